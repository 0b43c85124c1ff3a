"""The command line ``lowcomm-node``.

common      options that commands share
create      init, create, plan: a new run
data        data pack, verify, show: packed text
members     invite, remove, amend: a run created here
join        the node itself
running     look at the running node, and steer it
results     checkpoint, generate, eval, report, track
machine     doctor, ping, id, config, demo
lend        lend, pair: machines of one household
"""

import sys

from lowcomm_node.cli import (  # noqa: F401
    create,
    data,
    join,
    lend,
    machine,
    members,
    results,
    running,
)
from lowcomm_node.cli.common import app
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import add_version, run_app
from lowcomm_node.system.command import end

GROUPS = {
    "Take part": ("join", "demo", "pause", "resume", "limits", "finish", "lend", "pair"),
    "Look": ("status", "web", "peers", "exchanges", "logs", "report", "doctor", "ping"),
    "Model": ("generate", "eval", "checkpoint"),
    "Your own run": ("init", "create", "plan", "data", "invite", "amend", "remove"),
    "Scripts": ("id", "config", "track"),
}
"""The help, in this order."""
OLD_NAMES = {
    "rounds": ("exchanges",),
    "stop": ("finish", "--now"),
    "wait": ("status", "--wait"),
    "healthy": ("status", "--check"),
    "paths": ("id",),
}
"""Commands of 0.1; they go with 0.3."""

add_version(app, "lowcomm-node")
_groups = {name: group for group, names in GROUPS.items() for name in names}
app.registered_commands.sort(key=lambda known: [*_groups].index(known.name or ""))
for _known in (*app.registered_commands, *app.registered_groups):
    _known.rich_help_panel = _groups[_known.name or ""]


def main() -> None:
    """Entry point: an error on purpose becomes one line and its exit code."""
    sys.argv[1:2] = OLD_NAMES.get(sys.argv[1], sys.argv[1:2]) if sys.argv[1:] else []
    end(run_app(app, find_p2pd))
