"""The libp2p process ``p2pd``: connections, relays and streams between peers. It knows no DHT.

p2pd.py            the child process                 hivemind_client.py  hivemind's client of it, with deadlines
control.py         what we ask it ourselves          hivemind_parts.py   all that we import of hivemind
multiaddress.py    addresses as text and as bytes    varint.py           the numbers in them
interface.py       what others ask of streams        streams.py          streams that peers open to us
entry_points.py    where peers are dialed            reachability.py     where we can be dialed
targets.py         where a stranger may make us dial
relay.py           places at relays                  relaying.py         a relay within its owner's limits
punching.py        holes in NATs                     bound.py            connections of an address that is gone
"""
