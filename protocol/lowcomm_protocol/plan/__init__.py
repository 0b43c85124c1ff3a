"""What is due when, and with whom: fragments, their schedule, the swarm step, and the order of
candidates."""
