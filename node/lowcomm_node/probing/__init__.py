"""Probes, both ends: how others see this machine, whether they can call it, how fast its line is.

prober.py     answers, at the bootstrap server and at every node
asker.py      asks, over a stream of libp2p; the messages in such a stream
dialing.py    calls somebody back
"""
