"""The loopback control API: what the command line asks, and the only way to steer a running node."""
