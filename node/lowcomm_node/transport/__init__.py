"""Bytes between authenticated peers, over gRPC. It knows neither fragments nor tensors.

server.py         the gRPC server                      channels.py       the calling side
stream.py         both ends of a stream                call.py           one call, whose caller must read
tls.py            certificates and call credentials    certificates.py   ... found by their hash
nonces.py         ... each credential is good once     routes.py         which route to take: direct, or a tunnel
peer_channel.py   ... carried out, one a peer          tunnel/           the service over streams of libp2p
bandwidth.py      the owner's limits of the line       traffic.py        bytes and rates of each peer
congestion.py     congestion control                   ping.py           latency and rate of each route
guard/            what strangers may take of the server
"""

import os

# gRPC's core writes to stderr on its own; what matters to an owner we say ourselves. Read when grpc
# is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
