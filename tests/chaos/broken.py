"""Nodes to which faults happen by plan, in a real swarm."""

import subprocess
from pathlib import Path
from typing import Any

from faults import Fault, Plan
from kit import Node, Swarm

FAULTY = Path(__file__).parent / "faulty.py"


class FaultyNode(Node):
    """A ``lowcomm-node join`` with a plan; started again in the same home it goes on with what has not happened."""

    plan: Plan

    def launch(self, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start the real command line behind wrapped boundaries."""
        plan, self.fired = self.home / "plan.json", self.home / "fired"
        plan.write_text(self.plan.to_json())
        return subprocess.Popen([command[0], str(FAULTY), str(plan), str(self.fired), *command[3:]], **options)

    def happened(self) -> list[str]:
        """What of the plan has happened."""
        return self.fired.read_text().splitlines() if self.fired.exists() else []

    def left(self) -> list[Fault]:
        """What of the plan has not happened yet."""
        happened = self.happened()
        return [fault for fault in self.plan.faults if repr(fault) not in happened]


def faulty_node(swarm: Swarm, name: str, plan: Plan, *arguments: str) -> FaultyNode:
    """Start a node to which this happens."""
    kind = type("Planned", (FaultyNode,), {"plan": plan})
    node = kind(swarm.folder / name, swarm.address, *arguments)
    swarm.processes.append(node)
    return node
