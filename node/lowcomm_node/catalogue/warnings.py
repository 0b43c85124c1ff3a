"""What the owner should know: a code for each warning of `status`."""

from collections.abc import Mapping
from enum import StrEnum

from lowcomm_node.catalogue.message import Message


class WarningCode(StrEnum):
    """What a warning is about."""

    SETTINGS = "settings"
    RUN_CHOSEN = "run-chosen"
    RUN_ENDED = "run-ended"
    STARTED_ALONE = "started-alone"
    CLOCK = "clock"
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
