"""How peers find each other: a DHT of small signed records.

interface.py   what the node asks of it          keys.py   names of records, and what makes one valid
hivemind.py    the real one                      p2pd.py   the libp2p process that it runs
memory.py      its twin without a network
"""
