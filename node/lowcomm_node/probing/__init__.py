"""Probes, both ends: how others see this machine, whether they can call it, how fast its line is.

prober.py      answers: at the bootstrap server, and at every node       asker.py    asks, over a stream of libp2p
dialing.py     calls somebody back                                       wire.py     messages in such a stream
measuring.py   latency and rate of any line
"""
