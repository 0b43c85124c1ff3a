"""Everything that two peers must agree on.

No sockets, no files, no clock and no randomness of its own: time, seeds and bytes are arguments.
``lowcomm_node`` carries out what is decided here.
"""

PROTOCOL_VERSION = 4
"""Peers exchange only with peers of the same protocol version."""
