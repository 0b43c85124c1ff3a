"""Being a member of a swarm: find its run, be admitted, know the others, come back after an
outage."""
