"""Bytes between authenticated peers, over gRPC. It knows neither fragments nor tensors.

server.py         the listening gRPC server            service.py        authenticates calls, hands them on
channels.py       the calling side                     peer_channel.py   opens the routes to one peer
stream.py         both ends of a stream                call.py           one call, with a deadline
tls.py            certificates and call credentials    certificates.py   ... found by their hash
nonces.py         ... each credential is valid once    routes.py         chooses direct or tunnel
bandwidth.py      the owner's rate limits              tunnel/           gRPC over libp2p streams
traffic.py        bytes and rates per peer             ping.py           latency and rate per route
congestion.py     TCP congestion control               guard/            limits on callers
"""

import os

# gRPC's core writes to stderr. We report what matters to an owner ourselves. gRPC reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
