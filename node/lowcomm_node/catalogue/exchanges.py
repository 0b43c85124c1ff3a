"""Why an exchange was not applied, or a peer took no part in it: causes, and refusals of offers."""

from collections.abc import Mapping

from lowcomm_node.catalogue.message import Message
from lowcomm_protocol.exchange.base import Cause
from lowcomm_protocol.matching import Refusal

_LATER = "Nothing: it is met again at a later exchange."
_RARE = "Nothing, while it is rare; `lowcomm-node peers` shows routes, docs/reach.md mends them."
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
