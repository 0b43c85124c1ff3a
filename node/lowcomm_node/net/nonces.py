"""Nonces of used credentials: each is valid once. Quotas per peer and address bound the table.

A peer that exceeds its quota loses its own oldest nonce, and an address its own; if the whole table
is full, the address that holds most does. The table keeps a *floor* for a peer that lost a nonce:
the peer's credentials issued at that time or before are refused, so that no forgotten nonce is
valid twice. There is no clock: time is an argument.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import NamedTuple

from lowcomm_node.system.quota import prefixes_of

OF_PEER, OF_ADDRESS, OF_ALL = 2560, 10_240, 65_536
"""Nonces of one peer, of one address (IPv4, or /64 of IPv6), and of all. A peer may call 1200 times
a minute, an address 4800 times, and a nonce is kept for two minutes. Each takes about 660 bytes."""
MAX_FLOORS = 4096

_Key = bytes


class _Used(NamedTuple):
    peer: str
    address: str
    issued: float
    at: float


class Nonces:
    """The nonces used recently."""

    def __init__(
        self,
        life: float,
        of_peer: int = OF_PEER,
        of_address: int = OF_ADDRESS,
        of_all: int = OF_ALL,
    ) -> None:
        """``life``: seconds for which a nonce is remembered."""
        self._life = life
        self._of_peer = of_peer
        self._of_address = of_address
        self._of_all = of_all
        self._used: OrderedDict[_Key, _Used] = OrderedDict()
        self._peers: dict[str, OrderedDict[_Key, None]] = {}
        self._addresses: dict[str, OrderedDict[_Key, None]] = {}
        self._floors: OrderedDict[str, float] = OrderedDict()
        """Latest time of issue at which credentials of a peer are refused."""

    def __len__(self) -> int:
        """Nonces remembered."""
        return len(self._used)

    def was_used(self, peer: str, nonce: bytes, issued: float, now: float) -> bool:
        """Whether a peer's credential was used before, or may have been; ``issued``: when the peer
        made it."""
        # One from the far future was used while the clock was ahead.
        while self._used and abs(now - next(iter(self._used.values())).at) > self._life:
            self._drop(next(iter(self._used)))
        return _key(peer, nonce) in self._used or issued <= self._floors.get(peer, float("-inf"))

    def use(self, peer: str, place: str, nonce: bytes, issued: float, now: float) -> None:
        """Remember a nonce. ``place``: the address that the call came from."""
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
    """A digest that is shorter than peer id and nonce."""
    return sha256(peer.encode() + nonce).digest()[:16]
