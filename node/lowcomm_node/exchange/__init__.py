"""The exchange over the network: carries out what ``lowcomm_protocol.exchange`` decides.

exchanger.py    what is due, what runs, who is accepted
round.py        one exchange: turns effects into work and results into events
pair_round.py   ... of two                                      group_round.py  ... of a group
link.py         one stream to one member: contents out, contents in
frames.py       what members of a group tell, checked           offers.py       offers and refusals, checked
history.py      what became of exchanges
stream.py       the two ends of a gRPC stream behind one face
service.py      the gRPC server: Swap, Fetch, Describe, Ping    channels.py     the calling side
call.py         one call there, whose caller must read          company.py      with how many peers we talk
routes.py       which route to take: direct, or a tunnel        line.py         ... carried out, one a peer
tunnel.py       the service over streams of libp2p              way.py          ... the caller's end to one peer
pipe.py         carries the bytes of a tunnel                   tunnel_session.py   what outlives its streams
tunnel_frames.py   what the ends of a tunnel tell each other    crowd.py        who gives way where too many come
throttle.py     how much of the link the owner allows           traffic.py      bytes and rates of each peer
connections.py  our TCP connections                             congestion.py   ... those that lose go on with BBR
donor.py        state for joiners: the donor's side             fetch.py        ... the joiner's, from several at once
overhead.py     what comes over them beside messages            strangers.py    ... and those that nobody vouched for
turns.py        whom a donor serves, and who waits              gathering.py    ... which pieces are here, and go together
security.py     certificate, call credentials                  nonces.py       ... each is good once
pinging.py      latency and rate of each route, both sides
"""

import os

# gRPC's core writes to stderr on its own; what matters to an owner we say ourselves. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
