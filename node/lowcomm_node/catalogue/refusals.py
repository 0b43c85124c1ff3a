"""Refusals, by the reason that `status` counts them under."""

from collections.abc import Mapping

from lowcomm_node.catalogue.message import Message

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
