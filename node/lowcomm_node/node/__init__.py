"""One node: its life, its part in a run, its controls, and its trainer from outside."""
