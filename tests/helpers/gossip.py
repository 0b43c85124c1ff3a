"""Peers that know each other by `View`s alone: they gossip over the virtual network and look at
shards of a DHT, as nodes do.

    each ROUND    a call to active peers that were silent for LONGEST_REFRESH, and to passive ones
                  while links are missing; both ends hand over samples of their active peers
    each LOOK     our own shard and a random one
    at first      the door

A call is one event: both ends learn at the same moment. The DHT answers at once, and forgets who
dies after LIFE seconds.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nsmallest
from random import Random

from lowcomm_node.simulation.network import Network
from lowcomm_protocol.peers import shards, view
from lowcomm_protocol.peers.roster import LONGEST_REFRESH
from lowcomm_protocol.peers.view import View

ROUND, LOOK = 10.0, 60.0
"""Seconds."""
TIMEOUT = 5.0
"""Seconds after which a call without an answer has failed."""
AT_ONCE = 8
"""Passive peers that are asked for a link in a round."""
REST = 60.0
"""Seconds after which a passive peer is asked again."""
LIFE = 600.0


class Dht:
    """What keepers hold of one run; all shards have the depth that fits the number of peers."""

    def __init__(self, count: int, random: Random) -> None:
        self.bits = 0
        while count >> self.bits > shards.MOST * 2 // 3:
            self.bits += 1
        self._random = random
        self._shards = [dict[str, float]() for _ in range(1 << self.bits)]
        """By number: the peers, and when their records expire where nobody renews them."""
        self._door: tuple[float, list[str]] = (-1.0, [])

    def publish(self, peer: str) -> None:
        """A peer begins to keep its record there."""
        self._shards[self._of(peer)][peer] = float("inf")

    def withdraw(self, peer: str, expires: float) -> None:
        """A peer renews its record no more."""
        self._shards[self._of(peer)][peer] = expires

    def door(self, now: float) -> list[str]:
        """The sample that newcomers find, a minute old at most."""
        if not 0.0 <= now - self._door[0] < 60.0:
            all_ = [peer for shard in self._shards for peer in self._there(shard, now)]
            self._door = (
                now,
                nsmallest(shards.MAX_LISTED, all_, lambda peer: shards.rank(peer, now)),
            )
        return self._door[1]

    def own(self, peer: str, now: float) -> list[str]:
        """The peers of a peer's shard."""
        return self._there(self._shards[self._of(peer)], now)

    def random(self, now: float) -> list[str]:
        """The peers of a random shard."""
        return self._there(self._random.choice(self._shards), now)

    def _of(self, peer: str) -> int:
        return shards.shard_of("run", peer, self.bits)

    def _there(self, shard: dict[str, float], now: float) -> list[str]:
        for peer in [peer for peer, expires in shard.items() if expires <= now]:
            del shard[peer]
        return list(shard)


class Gossip:
    """The membership of all peers: their views, the DHT, and calls between them."""

    def __init__(
        self,
        network: Network,
        count: int,
        reaches: Callable[[str, str], bool] = lambda one, other: True,
    ) -> None:
        self.network, self.reaches = network, reaches
        self.random = Random(f"gossip:{network.random.random()}")
        self.dht = Dht(count, self.random)
        self.members: dict[str, Member] = {}
        self.places: dict[str, tuple[str, ...]] = {}
        self.calls = 0

    def join(self, member: "Member", places: Sequence[str]) -> None:
        """A peer comes."""
        self.members[member.name], self.places[member.name] = member, tuple(places)
        self.dht.publish(member.name)
        self.network.after(self.random.uniform(0.0, 1.0), member.begin)

    def remove(self, peer: str, *, dies: bool = True) -> None:
        """A peer goes: with a word, so that its record says so, or none."""
        del self.members[peer]
        self.dht.withdraw(peer, self.network.now + (LIFE if dies else 0.0))

    def run(self, seconds: float) -> None:
        """Let them gossip for a while."""
        until = self.network.now + seconds
        self.network.at(until, lambda: None)
        while self.network.now < until:
            self.network.advance()

    def call(self, caller: "Member", peer: str, asks: bool) -> None:
        """Call a peer, and ask for a link or not."""
        self.calls += 1
        other = self.members.get(peer)
        if other is None or not self.reaches(*sorted((caller.name, peer))):
            self.network.after(TIMEOUT, caller.on_silent, peer)
            return
        self.network.after(self.random.uniform(0.05, 0.15), self._answer, caller, peer, asks)

    def _answer(self, caller: "Member", peer: str, asks: bool) -> None:
        other = self.members.get(peer)
        if other is None or self.members.get(caller.name) is not caller:
            return
        other.meet(caller.name, caller.handed_over(peer))
        caller.meet(peer, other.handed_over(caller.name))
        if asks or peer in caller.view.active:
            accepted = other.accepts(caller.name, wanted=caller.wanted)
            if not accepted:
                caller.view.unlink(peer)
            elif not caller.accepts(peer, asked=False):
                other.view.unlink(caller.name)


class Member:
    """One peer and its view."""

    def __init__(self, gossip: Gossip, name: str) -> None:
        self.gossip, self.name = gossip, name
        self.view = View(name)
        self.heard: dict[str, float] = {}
        """When active peers were last heard of."""
        self._asked: dict[str, float] = {}
        """Passive peers that were asked for a link, and when."""
        self._look_at = 0.0

    @property
    def now(self) -> float:
        """Seconds."""
        return self.gossip.network.now

    def begin(self) -> None:
        """Begin with what the door shows."""
        self.learn(self.gossip.dht.door(self.now), listed=True)
        self._round()

    def learn(self, peers: Iterable[str], *, listed: bool) -> None:
        """Take in records."""
        places, now, kept = self.gossip.places, self.now, self.view
        for peer in peers:
            if peer != self.name and (listed or peer not in kept):
                kept.learn(peer, places[peer], now, listed)

    def meet(self, peer: str, records: Collection[str]) -> None:
        """A peer has called, or answered, and hands over records."""
        self.learn([peer], listed=True)
        self.learn(records, listed=False)
        self.heard[peer] = self.now

    def handed_over(self, to: str) -> Collection[str]:
        """Records for a peer that we call, or that calls us."""
        return self.view.sample(to)

    @property
    def wanted(self) -> int:
        """Links that it looks for, as it says."""
        return self.view.wanted

    def accepts(self, peer: str, *, asked: bool = True, wanted: int = 0) -> bool:
        """Whether a link to a peer is made, or there already."""
        return self.view.link(peer, self.now, asked, wanted)

    def on_silent(self, peer: str) -> None:
        """A peer has not answered."""
        if peer in self.view.active:
            self.view.unlink(peer, failed=True)
        else:
            self.view.forget(peer)

    def _round(self) -> None:
        gossip, now, known = self.gossip, self.now, self.view
        if gossip.members.get(self.name) is not self:
            return
        if now >= self._look_at:
            self._look_at = now + LOOK
            self.learn(gossip.dht.own(self.name, now), listed=True)
            self.learn(gossip.dht.random(now), listed=True)
        for peer in [
            peer for peer in known.active if now - self.heard.get(peer, 0.0) >= LONGEST_REFRESH
        ]:
            self.heard[peer] = now  # one call at a time
            gossip.call(self, peer, asks=False)
        if known.wanted:
            self._ask(now)
        gossip.network.after(ROUND * gossip.random.uniform(0.9, 1.1), self._round)

    def _ask(self, now: float) -> None:
        self._asked = {peer: at for peer, at in self._asked.items() if now - at < REST}
        free = [peer for peer in self.view.passive if peer not in self._asked]
        free = self.gossip.random.sample(free, min(len(free), 4 * AT_ONCE))
        free = [peer for peer in free if self.view.is_candidate(peer)]
        most = min(AT_ONCE, view.ACTIVE - len(self.view.active))
        for peer in sorted(free, key=self.view.crowd)[:most]:
            self._asked[peer] = now
            self.gossip.call(self, peer, asks=True)


class Sybil(Member):
    """One of many keys at few addresses: it hands over others of them, and floods peers with wishes
    for links."""

    PAUSE = 2.0
    """Seconds between two of its wishes."""

    def __init__(self, gossip: Gossip, name: str, accomplices: Sequence[str]) -> None:
        super().__init__(gossip, name)
        self.accomplices = accomplices

    def begin(self) -> None:
        """See Member."""
        if self.gossip.members.get(self.name) is self:
            victim = self.gossip.random.choice(list(self.gossip.members))
            self.gossip.call(self, victim, asks=True)
            self.gossip.network.after(self.PAUSE, self.begin)

    def meet(self, peer: str, records: Collection[str]) -> None:
        """See Member."""

    def handed_over(self, to: str) -> Collection[str]:
        """See Member."""
        return self.gossip.random.sample(
            self.accomplices, min(len(self.accomplices), view.SHUFFLED)
        )

    @property
    def wanted(self) -> int:
        """See Member; it says that it has none."""
        return view.ACTIVE

    def accepts(self, peer: str, *, asked: bool = True, wanted: int = 0) -> bool:
        """See Member."""
        return True


def in_degrees(members: Iterable[Member]) -> dict[str, int]:
    """In how many lists of active peers each of these is."""
    degrees = {member.name: 0 for member in members}
    for member in members:
        for peer in member.view.active:
            if peer in degrees:
                degrees[peer] += 1
    return degrees


def largest_component(members: Iterable[Member]) -> float:
    """The share of these that active links between them connect."""
    links = {member.name: set(member.view.active) for member in members}
    for name, peers in links.items():
        peers.intersection_update(links)
        for peer in peers:
            links[peer].add(name)
    left, largest = set(links), 0
    while left:
        reached, edge = set[str](), {left.pop()}
        while edge:
            reached |= edge
            edge = set().union(*(links[name] for name in edge)) - reached
        left -= reached
        largest = max(largest, len(reached))
    return largest / len(links)
