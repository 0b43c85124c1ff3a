"""Tunnels: gRPC connections over streams of libp2p, for peers that can't be dialed.

tunnels.py   all tunnels of a node                     callee.py    sessions of others with us
dialer.py    the caller's end to one peer              pump.py      moves the bytes
watched.py   a socket and its event-loop callbacks     session.py   what outlives a stream
frames.py    the words between the two ends
"""
