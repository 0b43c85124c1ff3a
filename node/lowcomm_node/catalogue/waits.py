"""Why a node does not train: by its phase, and where it is paused by the rule that holds it.

The sentence in `status` is more exact: it names peers, times and limits.
"""

from collections.abc import Mapping

from lowcomm_node.catalogue.message import Message

PHASES: Mapping[str, Message] = {
    "starting": Message("The node has just started.", "Nothing: it takes seconds."),
    "joining": Message(
        "It looks for the swarm, and for the run in it.",
        "If it lasts for minutes, check the network and the addresses after `--peers`; "
        "`lowcomm-node doctor` tries them.",
    ),
    "syncing": Message(
        "It gets files, text and the state of the run, or waits for as many peers as the run "
        "begins with.",
        "Nothing, while the figures move; on a slow line raise `--max-down`.",
    ),
    "training": Message(
        "It trains, but alone, or without exchanges of its own; the sentence says why.",
        "Nothing, if it passes; else raise the limit that it names, or see `lowcomm-node peers`.",
    ),
    "restarting": Message(
        "The trainer failed, and is started again.",
        "Nothing, if it happens once; the warning says what failed.",
    ),
    "paused": Message("The owner, or a rule of the owner, holds it.", "`lowcomm-node resume`"),
    "finishing": Message(
        "It saves, and ends the exchanges that are under way.", "Nothing: it takes seconds."
    ),
    "finished": Message(
        "The run is over; the node serves its state to others.",
        "`lowcomm-node stop` ends it, if you need the machine.",
    ),
    "left": Message("The node has left the swarm.", "`lowcomm-node join` takes part again."),
}

HOLDS: Mapping[str, Message] = {
    "owner": Message("The owner has paused the node.", "`lowcomm-node resume`"),
    "schedule": Message(
        "It is outside the hours that the owner gave.", "Wait, or change `--schedule`."
    ),
    "in-use": Message(
        "Somebody uses the machine, and the node trains only while nobody does.",
        "Leave the machine alone for as long as the sentence says, or drop `--only-idle`.",
    ),
    "battery": Message(
        "The machine runs on its battery, and the owner does not want that.",
        "Plug it in, or allow it with `--on-battery`.",
    ),
}
