"""Stand-ins for tests: ours, and those of programs that use this package. No node runs them.

memory_dht        a DHT in this process: records and streams between peers
wire              two ends of gRPC over TLS on loopback, and ends that misbehave
donors            states that no training has made, and donors that serve them
scripted_trainer  a trainer of bytes in place of tensors, which the test holds and fails
light_trainer     a trainer process without tensors, which fails as it is told
driven_trainer    the real trainer's loop on the thread of the test
tiny              settings of the smallest trainer
"""
