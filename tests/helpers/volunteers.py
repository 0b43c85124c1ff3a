"""Volunteers as they were measured: how long they stay, how fast their lines are, and which of them
reach each other.

    stays     Weibull, shape 0.38: sessions of a BitTorrent swarm (Debian), Stutzbach and Rejaie,
              "Understanding churn in peer-to-peer networks", IMC 2006. Its scale, 42.4 minutes,
              means 0.37 departures an hour for each peer that is there; a churn of our own scales
              it.
    NATs      52.19 % of peers are behind one: Henningsen et al., "Mapping the interplanetary
              filesystem", 2020 (arXiv 2002.07747). Of two that both are, 70 % connect directly
              after punching: Trautwein et al., 2025 (arXiv 2510.27500); the rest need a relay.
    uplinks   18.88 Mbit/s on fixed and 7.94 Mbit/s on mobile lines, means of the United States in
              June 2017: Speedtest (Ookla). The shares of both kinds, what a relay carries, and how
              many pairs find none are assumptions.
"""

from functools import lru_cache
from hashlib import sha256
from math import gamma
from random import Random
from typing import Any

from lowcomm_node.simulation.network import Network, SimulatedStream

SHAPE, SCALE_SECONDS = 0.38, 42.4 * 60.0
BEHIND_NAT, PUNCHED = 0.5219, 0.70
FIXED, MOBILE = 18.88e6 / 8, 7.94e6 / 8
"""Bytes a second."""
ON_MOBILE, WITHOUT_RELAY = 0.2, 0.1
"""Shares: of peers, and of pairs that need a relay."""
RELAY_SECONDS, RELAY_RATE = 0.08, 500_000.0
"""A relay's longer way, and what it carries of one stream."""
CONNECT_SECONDS = 5.0
"""After which a call to a peer that can't be reached is given up."""
MEAN_STAY = SCALE_SECONDS * gamma(1.0 + 1.0 / SHAPE)


def stay(random: Random, churn: float, *, is_there: bool = False) -> float:
    """Seconds that a peer stays, of a swarm that loses ``churn`` times its size an hour;
    ``is_there``: from now on, of one that has come before (long stays are met more often)."""
    scale = SCALE_SECONDS * 3600.0 / churn / MEAN_STAY
    if is_there:
        return random.random() * scale * random.gammavariate(1.0 + 1.0 / SHAPE, 1.0) ** (1 / SHAPE)
    return random.weibullvariate(scale, SHAPE)


def uplink(peer: str) -> float:
    """Bytes a second of a peer's line."""
    return MOBILE if lot("uplink", peer) < ON_MOBILE else FIXED


def lot(*names: str) -> float:
    """A number in [0, 1) that the names alone decide."""
    return int.from_bytes(sha256("/".join(names).encode()).digest()[:6]) / 2**48


@lru_cache(maxsize=1 << 20)
def way(one: str, other: str) -> str:
    """How two peers, in order of their names, connect: ``direct``, ``relay`` or ``none``."""
    both = max(lot("nat", one), lot("nat", other)) < BEHIND_NAT
    if not both or lot("punch", one, other) < PUNCHED:
        return "direct"
    return "none" if lot("relay", one, other) < WITHOUT_RELAY else "relay"


def can_meet(one: str, other: str) -> bool:
    """Whether two peers, in order of their names, connect at all."""
    return way(one, other) != "none"


class HomeNetwork(Network):
    """A network of such lines, in which some pairs meet through a relay, and some not at all."""

    def send(
        self,
        stream: SimulatedStream,
        sender: str,
        kind: str,
        payload: Any = None,
        size: int = 0,
        late: float = 0.0,
    ) -> None:
        """See Network."""
        match way(*sorted((stream.caller, stream.callee))):
            case "relay":
                late += RELAY_SECONDS + size / RELAY_RATE
            case "none":
                if kind == "hello":
                    self.after(CONNECT_SECONDS, self.break_, stream)
                return
            case _:
                pass
        super().send(stream, sender, kind, payload, size, late)
