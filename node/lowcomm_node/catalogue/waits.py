"""Why a node does not train, or trains alone: a code for each reason.

The sentence in `status` is more exact: it names peers, times and limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lowcomm_node.catalogue.message import Message


class WaitCode(StrEnum):
    """What a node waits for, or why it trains alone."""

    LOOKING_FOR_SWARM = "looking-for-swarm"
    SWARM_SILENT = "swarm-silent"
    SWARM_UNLISTED = "swarm-unlisted"
    LOOKING_FOR_RUN = "looking-for-run"
    RUN_FILES = "run-files"
    FETCHING_FILE = "fetching-file"
    STARTING_TRAINER = "starting-trainer"
    TOKENIZING = "tokenizing"
    LOOKING_FOR_PEERS = "looking-for-peers"
    COPYING_STATE = "copying-state"
    FIRST_PEERS = "first-peers"
    EVALUATING = "evaluating"
    SLOW_DISK = "slow-disk"
    NOBODY_ALIVE = "nobody-alive"
    EXCHANGE_TOO_LONG = "exchange-too-long"
    FAR_FROM_PEERS = "far-from-peers"
    OWN_LINE = "own-line"
    NOT_APPLIED = "not-applied"
    PAUSING = "pausing"
    OWNER = "owner"
    SCHEDULE = "schedule"
    IN_USE = "in-use"
    BATTERY = "battery"
    TRAINER_FAILED = "trainer-failed"
    LEAVING = "leaving"
    RUN_OVER = "run-over"


@dataclass(frozen=True)
class Waiting:
    """What a node waits for, with its code."""

    code: WaitCode
    text: str


WAITS: Mapping[str, Message] = {
    WaitCode.LOOKING_FOR_SWARM: Message(
        "The node calls the peers that it knows of the swarm.",
        "If it lasts for minutes, check the network and the addresses after `--peers`; "
        "`lowcomm-node doctor` tries them.",
    ),
    WaitCode.SWARM_SILENT: Message(
        "No peer of the swarm answers; the node trains on, and calls them again and again.",
        "Check the network; `lowcomm-node doctor` tries every address.",
    ),
    WaitCode.SWARM_UNLISTED: Message(
        "Peers answer, but do not tell others of this node.",
        "Nothing, if it passes in minutes: the node publishes its record again. Else "
        "`lowcomm-node doctor`.",
    ),
    WaitCode.LOOKING_FOR_RUN: Message(
        "The swarm answers, but nobody has published the run.",
        "Correct `--run`, or ask the run's creator whether it is still published.",
    ),
    WaitCode.RUN_FILES: Message(
        "The node looks for the files of the run, and checks those that are here.",
        "Nothing: it takes as long as reading them.",
    ),
    WaitCode.FETCHING_FILE: Message(
        "A file of the run is fetched from peers, or no peer has it yet.",
        "Nothing, while the figures move; else get the file from the run's creator, and name it "
        "with `--tokenizer` or its folder with `--weights`.",
    ),
    WaitCode.STARTING_TRAINER: Message(
        "The trainer reads the text, builds the model, and loads the newest checkpoint.",
        "Nothing: a large model takes minutes.",
    ),
    WaitCode.TOKENIZING: Message(
        "The text is tokenized, once for this home.",
        "Nothing: the sentence says how long it takes yet.",
    ),
    WaitCode.LOOKING_FOR_PEERS: Message(
        "The node asks who takes part in the run, and how far they are.",
        "Nothing: it takes seconds.",
    ),
    WaitCode.COPYING_STATE: Message(
        "The swarm is ahead, so the node copies the state of its peers.",
        "Nothing, while the figures move; on a slow line raise `--max-down`.",
    ),
    WaitCode.FIRST_PEERS: Message(
        "The run begins with more peers than are here.",
        "Start the others, or wait: after five minutes it begins with those that came.",
    ),
    WaitCode.EVALUATING: Message(
        "The model is measured on held-out text.", "Nothing: training goes on at once."
    ),
    WaitCode.SLOW_DISK: Message(
        "A checkpoint is still being written when the next one is due.",
        "Put the home on a faster disk, or save less often: raise `--checkpoint-every`.",
    ),
    WaitCode.NOBODY_ALIVE: Message(
        "No other peer of the run is alive, so the node trains alone.",
        "Wait for others, or invite some; `lowcomm-node peers` lists who is there.",
    ),
    WaitCode.EXCHANGE_TOO_LONG: Message(
        "An exchange would take longer than the owner's limits allow, so the node begins none.",
        "Raise the limit that the sentence names: `--exchange-deadline`, `--max-up` or "
        "`--max-down`.",
    ),
    WaitCode.FAR_FROM_PEERS: Message(
        "The node is far from most peers, though it has copied their state of late.",
        "Nothing: it copies their state again. A machine that is much slower than the others stays "
        "behind.",
    ),
    WaitCode.OWN_LINE: Message(
        "Contents of several peers did not come, so the line of this machine is to blame.",
        "`lowcomm-node doctor` measures the line.",
    ),
    WaitCode.NOT_APPLIED: Message(
        "The last exchange was not applied; training goes on with the next.",
        "Nothing, if it passes; else see the code of the exchange with `lowcomm-node rounds`.",
    ),
    WaitCode.PAUSING: Message(
        "The node saves, and then frees the memory of its trainer.", "Nothing: it takes seconds."
    ),
    WaitCode.OWNER: Message("The owner has paused the node.", "`lowcomm-node resume`"),
    WaitCode.SCHEDULE: Message(
        "It is outside the hours that the owner gave.", "Wait, or change `--schedule`."
    ),
    WaitCode.IN_USE: Message(
        "Somebody uses the machine, and the node trains only while nobody does.",
        "Leave the machine alone for as long as the sentence says, or drop `--only-idle`.",
    ),
    WaitCode.BATTERY: Message(
        "The machine runs on its battery, and the owner does not want that.",
        "Plug it in, or allow it with `--on-battery`.",
    ),
    WaitCode.TRAINER_FAILED: Message(
        "The trainer failed, and is started again after a while.",
        "Nothing, if it happens once; else do what the warning says.",
    ),
    WaitCode.LEAVING: Message(
        "The node saves, and ends the exchanges that are under way.", "Nothing: it takes seconds."
    ),
    WaitCode.RUN_OVER: Message(
        "The run is over; the node hands its state to others.",
        "`lowcomm-node stop` ends it, if you need the machine.",
    ),
}
"""The rules of the owner have the codes that `pause` of `status` names."""

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
"""What a node does, by the phase that `status` shows."""
