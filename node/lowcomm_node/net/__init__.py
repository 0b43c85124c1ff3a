"""Bytes between authenticated peers: gRPC over TLS, or over libp2p streams of the process p2pd.

It knows neither fragments nor tensors, and no DHT.
"""

import os

# gRPC's core writes to stderr. We report what matters to an owner ourselves. gRPC reads this
# variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
