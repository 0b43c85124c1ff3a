"""Nonces of credentials that were used: each is good once. Bounded for each caller, so that no
caller fills the table of others.

A peer that makes more calls than are kept has its own oldest forgotten, and an address with too
many peers has its own; of all addresses together, the one that holds most. Of a forgotten nonce its
time of issue is kept: the peer's credentials of that time and before are refused, so that a
forgotten nonce is not good twice. No clock: time is an argument.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import NamedTuple

from lowcomm_node.system.quota import prefixes_of

OF_PEER, OF_ADDRESS, OF_ALL = 2560, 10_240, 65_536
"""Of one peer, of one address of IPv4 or /64 of IPv6, and of all: a peer may call 1200 times, an
address 4800 times a minute, and a nonce is kept for two. About 660 bytes each."""
MAX_FLOORS = 4096

_Key = bytes


class _Used(NamedTuple):
    peer: str
    address: str
    issued: float
    at: float


class Nonces:
    """What was used of late."""

    def __init__(self, life: float, of_peer: int = OF_PEER, of_address: int = OF_ADDRESS, of_all: int = OF_ALL) -> None:
        """``life``: seconds for which a nonce is remembered."""
        self._life = life
        self._of_peer = of_peer
        self._of_address = of_address
        self._of_all = of_all
        self._used: OrderedDict[_Key, _Used] = OrderedDict()
        self._peers: dict[str, OrderedDict[_Key, None]] = {}
        self._addresses: dict[str, OrderedDict[_Key, None]] = {}
        self._floors: OrderedDict[str, float] = OrderedDict()
        """Up to which time of issue credentials of a peer are refused."""

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._used)

    def was_used(self, peer: str, nonce: bytes, issued: float, now: float) -> bool:
        """Whether a credential of a peer was used before, as far as can be told; ``issued``: when
        the peer made it."""
        while self._used and next(iter(self._used.values())).at < now - self._life:
            self._drop(next(iter(self._used)))
        return _key(peer, nonce) in self._used or issued <= self._floors.get(peer, float("-inf"))

    def use(self, peer: str, place: str, nonce: bytes, issued: float, now: float) -> None:
        """Remember it. ``place``: the address that the call came from."""
        key, address = _key(peer, nonce), prefixes_of(place)[0]
        self._used[key] = _Used(peer, address, issued, now)
        of_peer = self._peers.setdefault(peer, OrderedDict())
        of_address = self._addresses.setdefault(address, OrderedDict())
        of_peer[key] = of_address[key] = None
        if len(of_peer) > self._of_peer:
            self._forget_oldest(of_peer)
        if len(of_address) > self._of_address:
            self._forget_oldest(of_address)
        if len(self._used) > self._of_all:
            self._forget_oldest(max(self._addresses.values(), key=len))

    def _forget_oldest(self, keys: OrderedDict[_Key, None]) -> None:
        key = next(iter(keys))
        peer, _, issued, _ = self._used[key]
        self._floors[peer] = max(issued, self._floors.get(peer, issued))
        self._floors.move_to_end(peer)
        if len(self._floors) > MAX_FLOORS:
            self._floors.popitem(last=False)
        self._drop(key)

    def _drop(self, key: _Key) -> None:
        used = self._used.pop(key)
        for held, name in ((self._peers, used.peer), (self._addresses, used.address)):
            del held[name][key]
            if not held[name]:
                del held[name]


def _key(peer: str, nonce: bytes) -> _Key:
    """Shorter than both."""
    return sha256(peer.encode() + nonce).digest()[:16]
