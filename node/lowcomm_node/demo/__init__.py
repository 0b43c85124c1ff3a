"""A swarm on one machine."""
