"""Nodes to which faults happen by plan, in a real swarm."""

from pathlib import Path

from disguised import DisguisedNode, start
from faults import Fault, Plan

from helpers.processes import Swarm

FAULTY = Path(__file__).parent / "faulty.py"


class FaultyNode(DisguisedNode):
    """A ``lowcomm-node join`` with a plan; started again in the same home it goes on with what has
    not happened."""

    @property
    def plan(self) -> Plan:
        """What is to happen."""
        return Plan.from_json(Path(self.program[1]).read_text())

    def happened(self) -> list[str]:
        """What of the plan has happened."""
        fired = Path(self.program[2])
        return fired.read_text().splitlines() if fired.exists() else []

    def left(self) -> list[Fault]:
        """What of the plan has not happened yet."""
        happened = self.happened()
        return [fault for fault in self.plan.faults if repr(fault) not in happened]


def faulty_node(swarm: Swarm, name: str, plan: Plan, *arguments: str) -> FaultyNode:
    """Start a node to which this happens."""
    file = swarm.folder / f"{name}.plan"
    file.write_text(plan.to_json())
    return start(
        FaultyNode, swarm, name, (FAULTY, file, swarm.folder / f"{name}.fired"), *arguments
    )
