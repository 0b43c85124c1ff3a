"""The DHT of hivemind: small signed records, by key and subkey.

interface.py   what the node asks of it       memory.py    the same without a network, for tests
hivemind.py    the real one                   guard.py     what strangers can't do to it
records.py     records in it                  keys.py      names of records, and what makes one valid
eviction.py    which record gives way         callers.py   who stores here, and from which network
answered.py    who has shown to be there      doors.py     what came of knocking at peers
duplicate_identity.py                         is our identity in use elsewhere
"""
