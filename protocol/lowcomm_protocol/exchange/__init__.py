"""Exchanges: who takes part, what is averaged, and whether it is applied; in a pair and in a
group."""
