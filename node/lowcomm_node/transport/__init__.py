"""Bytes between authenticated peers, over gRPC. It knows neither fragments nor tensors.

server.py         the gRPC server                      channels.py       the calling side
stream.py         both ends of a stream                call.py           one call, with a deadline
tls.py            certificates and call credentials    certificates.py   ... found by their hash
nonces.py         ... each credential is valid once    routes.py         chooses direct or tunnel
peer_channel.py   opens the routes to one peer         tunnel/           gRPC over libp2p streams
bandwidth.py      the owner's rate limits              traffic.py        bytes and rates per peer
congestion.py     TCP congestion control               ping.py           latency and rate per route
guard/            limits on unauthenticated callers
"""

import os

# gRPC's core writes to stderr. We report what matters to an owner ourselves. gRPC reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
