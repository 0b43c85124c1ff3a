"""The entry point of a swarm: a DHT peer with a fixed address that keeps runs published.

It takes no part in training.
"""
