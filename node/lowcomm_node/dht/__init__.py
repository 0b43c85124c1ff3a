"""The distributed hash table: signed records, and peers that know each other.

interface.py   what the node needs of a DHT    keys.py      keys, and what makes a record valid
hivemind.py    the real DHT                    guard.py     hardens hivemind against other peers
records.py     publish and look up             eviction.py  which record is evicted when full
callers.py     who stores a record here        answered.py  peers that have proved to be there
knocks.py      results of dialing entry points
duplicate_identity.py   another process with our identity
"""
