"""One exchange under way at this node: what belongs to it besides its decisions."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from lowcomm_node.exchange.link import Link
from lowcomm_protocol.exchange import Exchange
from lowcomm_protocol.matching import Offer


@dataclass
class Round:
    """An exchange of one fragment, with its streams, slots and timers."""

    exchange: Exchange
    offer: Offer
    """What we bring."""
    slot: int
    """Where our coded contribution lies."""
    began: float
    """Monotonic seconds."""
    called: bool
    """Whether a peer's call began it, not our own schedule."""
    links: dict[str, Link] = field(default_factory=dict)
    calls: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Slots of members' contributions."""
    members_known: asyncio.Event = field(default_factory=asyncio.Event)
    captured: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    realign: bool = False
    least: int = 0
    most: int = 0
    """Bytes that one contribution may have."""
    content: tuple[int, bytes] | None = None
    """Size and digest of ours."""

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.offer.fragment

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that entered the streams."""
        return sum(link.bytes_sent for link in self.links.values())

    @property
    def bytes_received(self) -> int:
        """Payload bytes that came out of the streams."""
        return sum(link.bytes_received for link in self.links.values())

    def describe(self, now: float) -> dict[str, Any]:
        """What ``status`` shows of it."""
        partners = self.exchange.partners
        return {
            "fragment": self.fragment,
            "round": self.offer.round,
            "stage": self.exchange.stage.value,
            "partners": list(partners),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_expected": 2 * (self.content[0] if self.content else self.most) * len(partners),
            "seconds": now - self.began,
        }
