"""The command line ``lowcomm-node``: one file a group of commands.

common      options that commands share
create      init, create, plan: a new run
members     invite, remove, amend: a run created here
join        the node itself
running     status, peers, wait, web, healthy, exchanges, logs, pause, resume, limits,
            finish, stop
results     checkpoint, generate, report, track
machine     doctor, ping, id, paths, config, demo
"""

# In the order of the help
from lowcomm_node.cli import create, join, machine, members, results, running  # noqa: F401
from lowcomm_node.cli.common import app
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import add_version, run_app
from lowcomm_node.system.command import end

add_version(app, "lowcomm-node")


def main() -> None:
    """Entry point: an error on purpose becomes one line and its exit code."""
    end(run_app(app, find_p2pd))
