"""How peers find each other: a DHT of small signed records.

interface.py   what the node asks of it          keys.py     names of records, and what makes one valid
hivemind.py    the real one                      guard.py    what strangers can't do to it
client.py      hivemind's parts, with deadlines  twin.py     is our identity in use elsewhere
watchdog.py    are we in the swarm, what to do   lifeline.py       does that, and looks around
known.py       doors kept for the next start     doors.py          what is said of doors
p2pd.py        the libp2p process that it runs   multiaddress.py   where a peer can be dialed
control.py     ... what we ask it ourselves      streams.py        streams that others open to us
relay.py       places at relays, for whom no     relaying.py       a relay that gives what its owner says
               other peer can dial               memory.py         the twin of all this without a network
"""
