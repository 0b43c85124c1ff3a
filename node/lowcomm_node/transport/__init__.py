"""Bytes between authenticated peers, over gRPC. It knows neither fragments nor tensors.

server.py         the listening gRPC server           service.py        authenticates calls
channels.py       the calling side                    peer_channel.py   all routes to one peer
connected.py      one open route                      routes.py         chooses direct or tunnel
stream.py         both ends of a stream               call.py           one call, with a deadline
tls.py            certificates and call credentials   certificates.py   ... found by their hash
nonces.py         ... each credential is valid once   tunnel/           gRPC over libp2p streams
bandwidth.py      the owner's rate limits             guard/            limits on callers
traffic.py        bytes and rates per peer            ping.py           latency, rate per route
congestion.py     TCP congestion control
"""

import os

# gRPC's core writes to stderr. We report what matters to an owner ourselves. gRPC reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
