"""The checks: each a function from what was seen to a finding, or None if it has nothing to say.

To add one, write the function with its faults and remedies in a file of this folder, and put it
into CHECKS where it should be read.
"""

from collections.abc import Callable

from lowcomm_node.doctor.checks import access, machine, network, node, reach
from lowcomm_node.doctor.observations import Observations
from lowcomm_node.doctor.report import Finding

Check = Callable[[Observations], Finding | None]

CHECKS: tuple[Check, ...] = (
    node.node,
    node.dht,
    access.names,
    access.proxy,
    access.portal,
    network.clock,
    reach.nat,
    reach.outside,
    network.udp,
    network.ipv6,
    network.bandwidth,
    network.packets,
    node.routes,
    machine.congestion,
    machine.disk,
    machine.memory,
    machine.priority,
    machine.gpu,
)
"""In the order in which findings are read."""
