"""What members tell each other beside contents, as messages of the virtual network."""

from typing import Any

from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.group import machine as groups
from lowcomm_protocol.exchange.pair import machine as pairs


def words_of(effect: base.Effect) -> tuple[str, str, Any] | None:
    """To whom an effect tells something, the kind of the message, and its payload; None for other
    effects."""
    match effect:
        case pairs.SendConfirm(peer=peer, members=members):
            return peer, "confirm", members
        case groups.SendRoll(peer=peer, roll=roll):
            return peer, "roll", roll
        case groups.SendMembers(peer=peer, members=members):
            return peer, "members", members
        case groups.SendHeld(peer=peer, held=held):
            return peer, "held", held
        case groups.SendCommit(peer=peer, shards=shards, heard=heard):
            return peer, "commit", (shards, heard)
        case _:
            return None


def event_of(peer: str, kind: str, payload: Any) -> Any:
    """The event that such a message of a peer is."""
    match kind:
        case "confirm":
            return pairs.Confirmed(peer=peer, members=payload)
        case "roll":
            return groups.RollCame(peer=peer, roll=payload)
        case "members":
            return groups.MembersCame(peer=peer, members=payload)
        case "held":
            return groups.HeldCame(peer=peer, held=payload)
        case "commit":
            shards, heard = payload
            return groups.CommitCame(peer=peer, shards=shards, heard=heard)
        case _:
            raise AssertionError(f"nobody understands {kind!r}")
