"""What strangers may take of the server.

rate_limits.py       how often and how many calls         peer_limit.py    how many peers at once
unauthenticated.py   connections without a credential     connections.py   our TCP connections
blocklist.py         addresses that the kernel drops      eviction.py      who gives way where too many come
overhead.py          bytes that belong to no message
"""
