"""Tunnels: gRPC connections over streams of libp2p, for peers that can't be dialed.

tunnels.py   both ends, and who may have one    dialer.py   the caller's end to one peer
pump.py      carries the bytes                  session.py  what outlives a stream
frames.py    what the two ends tell each other
"""
