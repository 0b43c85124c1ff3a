"""Codes of errors, refusals, waits, warnings and exchanges, each with a meaning and a remedy.

`docs/trouble.md` is written from these tables (`make tables`); a test fails where an entry is
missing. Codes stay as they are: scripts and pages of help name them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lowcomm_protocol.exchange.base import Cause
from lowcomm_protocol.matching import Refusal

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Message:
    """What a code means."""

    meaning: str
    remedy: str


def code_of(kind: type) -> str:
    """The code of a class of errors: ``NotRunning`` is ``not-running``."""
    return _CAPITAL.sub("-", kind.__name__.removeprefix("_")).lower()


ERRORS: Mapping[str, Message] = {
    "lowcomm-error": Message(
        "Something failed in a way that has no kind of its own.", "Do what the line says."
    ),
    "node-error": Message(
        "Something on this machine failed in a way that has no kind of its own.",
        "Do what the line says; `lowcomm-node doctor` looks at the whole machine.",
    ),
    "not-running": Message(
        "A command needs the node of this home, and none answers.",
        "Start it with `lowcomm-node join`, or name its home with `--home`.",
    ),
    "unhealthy": Message(
        "The node answers, but something that it needs does not work.",
        "`lowcomm-node doctor` says what, and what to do.",
    ),
    "incompatible": Message(
        "This release or this machine can't take part in that run.",
        "Install the release, or the extra, that the line names.",
    ),
    "no-peers": Message(
        "Nobody of the run can be reached.",
        "Check the network and the address after `--peers`; `lowcomm-node ping ADDRESS` tries it.",
    ),
    "not-admitted": Message(
        "The run does not take this peer: it is not listed, not invited, or was removed.",
        "Send the peer id that `lowcomm-node id` shows to the run's creator, or ask for an invite.",
    ),
    "config-error": Message(
        "An option, a setting or a path is wrong.",
        "Correct the value that the line names; `lowcomm-node config` shows all and their sources.",
    ),
    "data-error": Message(
        "The training text is missing, malformed or too short.",
        "Name other text with `--data`; docs/node.md says what a node reads.",
    ),
    "checkpoint-error": Message(
        "A saved state is missing, damaged, or not what was expected.",
        "`lowcomm-node checkpoint verify` says which are sound; an older one is taken by itself.",
    ),
    "trainer-error": Message(
        "The trainer process failed, or can't do what it was asked.",
        "The node starts it again by itself; if it gives up, its last lines say why.",
    ),
    "trainer-lost": Message(
        "The trainer process has died, or does not answer.",
        "The node starts it again from the newest checkpoint; check memory if it happens again.",
    ),
    "diverged": Message(
        "Many inner steps in a row gave no finite gradients.",
        "The node goes one checkpoint back; if it happens again, the run's learning rate is too "
        "high: tell its creator.",
    ),
    "not-finite": Message(
        "Weights or moments hold NaN or infinity: they are never saved, sent or loaded.",
        "The node goes back to a sound checkpoint by itself.",
    ),
    "unusable": Message(
        "What a peer contributed can't be decoded, or is implausible; nothing of it was applied.",
        "Nothing: the peer loses standing, and is left out if it goes on.",
    ),
    "link-lost": Message(
        "A stream to a peer broke off, or can't be opened; it costs one exchange.",
        "Nothing, where it is rare; `lowcomm-node peers` shows routes, docs/trouble.md mends them.",
    ),
    "gave-up": Message(
        "The peer gave up an exchange, and told why.",
        "Nothing: the fragment is exchanged with another peer.",
    ),
    "too-slow": Message(
        "What a peer sends would not come before the deadline of the exchange.",
        "Raise `--exchange-deadline`, or the limits `--max-up` and `--max-down` of the slower end.",
    ),
    "other-certificate": Message(
        "Somebody else answers at a peer's address.",
        "Nothing: the node asks again where that peer is.",
    ),
    "forgotten": Message(
        "The other end of a tunnel does not know the session any more.",
        "Nothing: the node opens a new one.",
    ),
    "turn-over": Message(
        "Others wait at a peer that has served us its state for long.",
        "Nothing: the node queues again, and goes on where it was.",
    ),
    "retry-later": Message(
        "Nothing is wrong, only the moment.",
        "Repeat the same command later.",
    ),
    "disk-full": Message(
        "A folder has no room; what was there before is untouched.",
        "Free some space, or raise `--max-disk`: the node goes on by itself.",
    ),
    "port-in-use": Message(
        "Another program holds an address that we were told to use.",
        "End that program, or choose another port.",
    ),
    "ended-mute": Message(
        "libp2p's process ended without a word.",
        "Start the node again; `lowcomm-node doctor` checks the program.",
    ),
    "spec-error": Message(
        "A run specification is not valid, or settings do not fit together.",
        "Correct the setting that the line names (docs/specification.md).",
    ),
    "version-error": Message(
        "A peer, a record or a run is of another protocol version.",
        "Install the release that the run's creator names; `lowcomm-node --version` tells yours.",
    ),
    "signature-error": Message(
        "A signature, a fingerprint or a peer id does not match.",
        "Copy it again, as a whole; if it still fails, do not trust where it came from.",
    ),
    "record-error": Message(
        "A record is malformed, stale, or claims too long a life.",
        "Nothing, if it is a stranger's; if it is yours, set the clock of this machine.",
    ),
    "admission-error": Message(
        "A peer may not take part in the run.",
        "Ask the run's creator for an invite.",
    ),
    "plan-error": Message(
        "The model can't be cut into fragments as the run says.",
        "The run's creator chooses another number of `fragments`, or another `pattern`.",
    ),
    "codec-error": Message(
        "A codec can't take the bytes or values that it got.",
        "Nothing, if they came from a peer: the exchange failed, and no more.",
    ),
    "implausible-error": Message(
        "A contribution is valid, but far from what honest peers send.",
        "Nothing: it was left out, and is held against the peer.",
    ),
    "protocol-violation": Message(
        "A peer did what the protocol does not allow.",
        "Nothing: it is held against the peer. Tell its author if it is a client of your own.",
    ),
}


_LATER = "Nothing: it is met again at a later exchange."
_RARE = "Nothing, while it is rare; `lowcomm-node peers` shows routes, docs/trouble.md mends them."
_DEADLINE = (
    "Raise `--exchange-deadline` on the end that the sentence names, or the limits `--max-up` and "
    "`--max-down`."
)
_RELEASE = "Upgrade the older of the two nodes."

EXCHANGES: Mapping[str, Message] = {
    Cause.NOBODY: Message(
        "Nobody else was training.", "Wait for others; `lowcomm-node peers` lists who is there."
    ),
    Cause.NO_PARTNER: Message(
        "No peer took part, each for a reason of its own.",
        "Nothing, if it passes; `lowcomm-node rounds` tells the reason of each.",
    ),
    Cause.UNANSWERED: Message("A peer did not answer in time.", _RARE),
    Cause.LOST: Message("The stream to a peer broke off, or could not be opened.", _RARE),
    Cause.GAVE_UP: Message(
        "A peer told that it gives up, and why.",
        "Nothing: the fragment is exchanged with another peer.",
    ),
    Cause.GAVE_WAY: Message(
        "A caller's exchange took longer than usual, and one of our own was due.",
        "Nothing: our own begins at once.",
    ),
    Cause.LATE: Message("Something did not come before the deadline.", _DEADLINE),
    Cause.UNUSABLE: Message(
        "What a peer contributed can't be decoded, or is implausible; nothing of it was applied.",
        "Nothing: the peer loses standing, and is left out if it goes on.",
    ),
    Cause.VIOLATED: Message(
        "A peer did what the protocol does not allow.",
        "Nothing: it is held against the peer.",
    ),
    Cause.MINORITY: Message(
        "Most of the group were there and took no part at that moment.",
        "Nothing, while it is rare: a part of the group leaves the exchange to the rest.",
    ),
    Cause.DISAGREED: Message(
        "The members did not agree on who takes part, or on what they hold.",
        "Nothing, while it is rare: streams broke off at an unlucky moment.",
    ),
    Cause.STOPPED: Message(
        "This node stopped: it leaves, pauses, copies a state, or its trainer failed.", "Nothing."
    ),
    Cause.REMOVED: Message("The run's creator has removed a member.", "Nothing."),
    Cause.OWN_FAULT: Message(
        "The trainer of this node could not do its part.",
        "See the warnings and the log; check memory if it happens again.",
    ),
    Refusal.BUSY: Message("It exchanges this fragment with another peer.", _LATER),
    Refusal.CROSSED: Message(
        "Both called at the same moment, and the other call goes on.", "Nothing."
    ),
    Refusal.TOO_SOON: Message("It merged this fragment a few steps ago.", _LATER),
    Refusal.FULL: Message("It holds as many contributions as it can.", _LATER),
    Refusal.TOO_SLOW: Message(
        "The exchange would take longer than the owner of one end allows.", _DEADLINE
    ),
    Refusal.NOT_TRAINING: Message("It does not train now.", _LATER),
    Refusal.OTHER_PROTOCOL: Message("It speaks another version of the protocol.", _RELEASE),
    Refusal.OTHER_RUN: Message(
        "It takes part in another run.", "Check that both ends name the same run with `--run`."
    ),
    Refusal.OTHER_PLAN: Message("It cuts the model in another way.", _RELEASE),
    Refusal.OTHER_CODEC: Message("It uses another codec.", _RELEASE),
    Refusal.UNKNOWN_FRAGMENT: Message("It does not know this fragment.", _RELEASE),
    Refusal.IMPLAUSIBLE_STEP: Message(
        "A peer claims a swarm step that no other peer supports.",
        "Nothing, if it passes: it copies the state of others when it has fallen behind.",
    ),
    Refusal.NOT_ALLOWED: Message(
        "It did not know the caller yet.", "Nothing: peers learn of each other within a minute."
    ),
    Refusal.NOT_TRUSTED: Message(
        "It leaves the other out for a while, after contributions that it could not use.",
        "Nothing, for a stranger; if it is your own node, see whether it trains on other text than "
        "the others.",
    ),
}


_THEIRS = "Nothing, while these are few: others send them."
_CLOCK = "Set the clocks of both machines; a network time service keeps them right."

REFUSALS: Mapping[str, Message] = {
    "too-large": Message("It has more bytes than allowed.", _THEIRS),
    "malformed": Message("It can't be read.", _THEIRS),
    "other-version": Message(
        "It is of another protocol version.", "Upgrade the older of the two nodes."
    ),
    "bad-signature": Message("Its signature does not match.", _THEIRS),
    "expired": Message("Its time is over.", _CLOCK),
    "from-the-future": Message("It was made in the future.", _CLOCK),
    "lives-too-long": Message("It claims to be valid for longer than allowed.", _THEIRS),
    "misplaced": Message("It was signed for another peer, run or place.", _THEIRS),
    "replayed": Message("It was used before.", _THEIRS),
    "missing": Message("A call came without a credential.", _THEIRS),
    "too-many": Message(
        "One peer or address asked for more than its share.",
        "If it was yours, put fewer nodes behind one address.",
    ),
    "other-certificate": Message(
        "A peer showed another certificate than its record names.",
        "Nothing, while it is rare: it has just started anew, or somebody stands between.",
    ),
    "not-invited": Message(
        "The run is for invited peers.", "Ask the run's creator: `lowcomm-node invite` makes one."
    ),
    "invite-expired": Message("The invite is too old.", "Ask the run's creator for a new one."),
    "invite-used-up": Message(
        "The invite was used as often as it may be.", "Ask the run's creator for a new one."
    ),
    "not-listed": Message(
        "The peer is not on the run's list.",
        "Send the creator the peer id that `lowcomm-node id` shows.",
    ),
    "removed": Message(
        "The run's creator has removed the peer.", "Ask the creator why; nothing else helps."
    ),
}


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
        "`lowcomm-node ping PEER` measures the line.",
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


class WarningCode(StrEnum):
    """What a warning is about."""

    SETTINGS = "settings"
    RUN_CHOSEN = "run-chosen"
    RUN_ENDED = "run-ended"
    STARTED_ALONE = "started-alone"
    CLOCK = "clock"
    IDENTITY_IN_USE = "identity-in-use"
    AMENDMENT = "amendment"
    TOKENIZER_UNCHECKED = "tokenizer-unchecked"
    FILE_REFUSED = "file-refused"
    FEW_PEERS = "few-peers"
    TOO_MANY_PEERS = "too-many-peers"
    NOT_TAKEN = "not-taken"
    RECORD_NOT_PUBLISHED = "record-not-published"
    NOT_KEPT = "not-kept"
    DEFECT = "defect"
    STATE_NOT_COPIED = "state-not-copied"
    STATE_OLD = "state-old"
    NO_DONOR = "no-donor"
    DONOR_LEFT_OUT = "donor-left-out"
    DRIFTED = "drifted"
    KEPT_WAITING = "kept-waiting"
    TRAINER_FAILED = "trainer-failed"
    CHECKPOINT_SKIPPED = "checkpoint-skipped"
    NOT_SAVED = "not-saved"
    JOURNAL = "journal"


WARNINGS: Mapping[str, Message] = {
    WarningCode.SETTINGS: Message(
        "A setting was given that means nothing here, and is ignored.",
        "Correct or leave away what the sentence names; `lowcomm-node config` shows what holds.",
    ),
    WarningCode.RUN_CHOSEN: Message(
        "Several published runs fit, so the node has taken the one that the operator of the "
        "bootstrap server serves, or whose peers answer.",
        "For another: `--run NAME@FINGERPRINT`.",
    ),
    WarningCode.RUN_ENDED: Message(
        "The peers of the run have trained it to its end, so there is nothing left to train.",
        "`lowcomm-node join --stay` copies the last state while anybody serves it.",
    ),
    WarningCode.STARTED_ALONE: Message(
        "No peer answered at the start, so the node trains on what its home knows of the run.",
        "Check the network; `lowcomm-node doctor` tries every address.",
    ),
    WarningCode.CLOCK: Message(
        "The clock of this machine differs from those of others, who will refuse its records.",
        "Set the clock; a network time service keeps it right.",
    ),
    WarningCode.IDENTITY_IN_USE: Message(
        "Another process takes part under the identity of this node, so peers mistake one for the "
        "other.",
        "End one of them, or give one a `--home` of its own; a copied home needs another "
        "`identity.key`.",
    ),
    WarningCode.AMENDMENT: Message(
        "The run's creator has changed it in a way that this release can't follow.",
        "Install the release that the creator names.",
    ),
    WarningCode.TOKENIZER_UNCHECKED: Message(
        "The run does not say which tokenizer it uses.",
        "Compare the SHA-256 of your file with that of the run's creator.",
    ),
    WarningCode.FILE_REFUSED: Message(
        "A peer gave a file that is not the run's; nothing of it is used.",
        "Nothing: the node asks others.",
    ),
    WarningCode.FEW_PEERS: Message(
        "Fewer peers came than the run begins with.", "Nothing: others may join later."
    ),
    WarningCode.TOO_MANY_PEERS: Message(
        "More peers are alive than the run is for, so exchanges are less useful.",
        "Train elsewhere, or ask the run's creator for a larger group.",
    ),
    WarningCode.NOT_TAKEN: Message(
        "A peer does not take this node into the run.",
        "Ask the run's creator for an invite, or why it was removed.",
    ),
    WarningCode.RECORD_NOT_PUBLISHED: Message(
        "Others could not be told where this node is; it is tried again.",
        "Nothing, while it is rare; else check the network with `lowcomm-node doctor`.",
    ),
    WarningCode.NOT_KEPT: Message(
        "The home could not keep what is known of invites and removals.",
        "Free some space, and see that the home can be written.",
    ),
    WarningCode.DEFECT: Message(
        "This program has a defect; the node goes on.",
        "Please report it with the log.",
    ),
    WarningCode.STATE_NOT_COPIED: Message(
        "Copying the state of peers failed; it is tried again.",
        "Nothing, if it passes; else free some space, or raise `--max-disk` or `--max-down`.",
    ),
    WarningCode.STATE_OLD: Message(
        "Copying took so long that the swarm is far ahead again.",
        "Raise `--max-down` if you can: the copy must be faster than the swarm trains.",
    ),
    WarningCode.NO_DONOR: Message(
        "No peer could hand over its state, so the node begins from its own.",
        "Nothing: merges bring it closer to the others.",
    ),
    WarningCode.DONOR_LEFT_OUT: Message(
        "A peer handed over a state that can't be right; it is not asked again.",
        "Nothing: others are asked.",
    ),
    WarningCode.DRIFTED: Message(
        "The weights are too far from those of most peers for merges to bring them back.",
        "Nothing: the node copies the state of others. If it happens often, the machine is too "
        "slow for the run, or others train on other text.",
    ),
    WarningCode.KEPT_WAITING: Message(
        "A peer begins exchanges and then sends nothing, or too slowly.",
        "Nothing: it is left out for longer each time. If the run is by invite, remove the peer.",
    ),
    WarningCode.TRAINER_FAILED: Message(
        "The trainer failed, and is started again from the newest checkpoint.",
        "Do what the sentence says; where memory ran out, lower `--max-memory` or `--micro-batch`.",
    ),
    WarningCode.CHECKPOINT_SKIPPED: Message(
        "A checkpoint is damaged, so an older one was taken.",
        "`lowcomm-node checkpoint verify` says which are sound; check the disk.",
    ),
    WarningCode.NOT_SAVED: Message(
        "Checkpoints can't be written; training goes on.",
        "Free some space, or raise `--max-disk`: the node goes on by itself.",
    ),
    WarningCode.JOURNAL: Message(
        "The journal can't be written; training goes on without it.",
        "Free some space, and see that the home can be written.",
    ),
}


CATALOGUE: Mapping[str, Mapping[str, Message]] = {
    "phases": PHASES,
    "waits": WAITS,
    "warnings": WARNINGS,
    "exchanges": EXCHANGES,
    "errors": ERRORS,
    "refusals": REFUSALS,
}
