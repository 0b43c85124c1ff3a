"""The exchange over the network: carries out what ``lowcomm_protocol.exchange`` decides.

exchanger.py    what is due, what runs, who is accepted
round.py        one exchange: turns effects into work and results into events
pair_round.py   ... of two                                      group_round.py  ... of a group
link.py         one stream to one member: contents out, contents in
frames.py       what members of a group tell, checked           offers.py       offers and refusals, checked
history.py      what became of exchanges
stream.py       the two ends of a gRPC stream behind one face
service.py      the gRPC server: Swap, Fetch, Describe          channels.py     the calling side
routes.py       which route to take: direct, or a tunnel        line.py         ... carried out, one a peer
tunnel.py       the service over streams of libp2p              pipe.py         carries their bytes
tunnel_frames.py   what the ends of a tunnel tell each other    traffic.py      bytes and rates of each peer
security.py     certificate, call credentials                   fetch.py        state for joiners, both sides
pinging.py      latency and rate of each route, both sides
"""

import os

# gRPC's core writes to stderr on its own; what matters to an owner we say ourselves. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
