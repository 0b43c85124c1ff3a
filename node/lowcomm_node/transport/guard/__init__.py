"""Limits on what callers may take of the server.

rate_limits.py       calls per minute and at once          peer_limit.py    peers at once
unauthenticated.py   connections without a credential      connections.py   our TCP connections
blocklist.py         addresses that the kernel drops       eviction.py      who makes room when full
overhead.py          bytes that belong to no message
"""
