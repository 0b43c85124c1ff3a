"""The libp2p process ``p2pd``: connections, relays and streams between peers. It knows no DHT.

p2pd.py            the child process                 hivemind_client.py  hivemind's client of it
control.py         our own requests to it            hivemind_parts.py   imports from hivemind
multiaddress.py    addresses as text and as bytes    varint.py           the numbers in them
interface.py       streams, as others see them       streams.py          streams opened to us
entry_points.py    where peers are dialed            reachability.py     where we can be dialed
targets.py         which dialing others may cause    punching.py         NAT hole punching
relay.py           reservations at relays            relaying.py         being a relay, limited
bound.py           connections of a lost address
"""
