"""How peers find each other: a DHT of small signed records.

interface.py      what the node asks of it          memory.py         the twin of all this without a network
hivemind.py       the real one                      guard.py          what strangers can't do to it
records.py        records in it                     keys.py           names of records, and what makes one valid
client.py         hivemind's parts, with deadlines  twin.py           is our identity in use elsewhere
watchdog.py       are we in the swarm, what to do   lifeline.py       does that, and looks around
entry_points.py   where the DHT can be entered      doors.py          what is said of doors
known.py          doors kept for the next start     whereabouts.py    where we can be dialed
p2pd.py           the libp2p process that it runs   multiaddress.py   addresses as text and as bytes
control.py        ... what we ask it ourselves      varint.py         ... the numbers in them
relay.py          places at relays, for whom no     relaying.py       a relay that gives what its owner says
                  other peer can dial               punching.py       holes in NATs
streams.py        streams that others open to us
"""
