"""The control API on loopback: the only way to look at a running node and to steer it."""
