"""Simulation: N replicas in one process, with the protocol's own objects, in virtual time over a
seeded network.

network.py   virtual time, streams that take time and break
driver.py    drives the machine of a peer over the network
peer.py      one peer: steps, captures and merges at their boundaries
contents.py  what exchanges carry, by kind
swarm.py     who takes part, attacks and churn, and what came of it
"""

from lowcomm_node.simulation.network import Conditions
from lowcomm_node.simulation.swarm import ATTACKS, Member, Result, simulate
from lowcomm_node.trainer.replica import Replica

__all__ = ["ATTACKS", "Conditions", "Member", "Replica", "Result", "simulate"]
