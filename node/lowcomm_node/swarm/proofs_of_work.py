"""Finds the proofs of work that an open run may ask for (lowcomm_protocol.work), and keeps them.

join     ── is a kept proof valid? ──► use it
         └─ else: tell how long it takes, hash in a thread, keep it, use it
later    ── a day before the week ends: find the next proof beside training ──► use it next week
"""

import asyncio
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time

from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.units import seconds as span
from lowcomm_protocol.peers.admission import Rules
from lowcomm_protocol.work import (
    OVERLAP,
    PROOF_BYTES,
    WEEK,
    Proof,
    is_good_in,
    read_proof,
    week_of,
    zero_bits,
)

CHUNK = 0.25
"""Seconds of hashing between two checks whether the proof is still wanted."""
CHECK_EVERY = 60.0
RENEW_BEFORE = OVERLAP
"""Seconds before the end of a week in which the next proof is found."""
MAX_KEPT = 4

Show = Callable[[str | None], None]


class Prover:
    """The proofs of one node in one run."""

    def __init__(
        self,
        rules: Rules,
        peer_id: str,
        path: Path | None,
        show: Show,
        clock: Callable[[], float] = time,
    ) -> None:
        """``path``: where proofs are kept, None for an ephemeral node; ``show``: receives the
        progress."""
        self._rules = rules
        self._peer_id = peer_id
        self._path = path
        self._show = show
        self._clock = clock
        self._proofs = [proof for proof in self._read() if self._is_sound(proof)]

    async def prove(self) -> bytes:
        """A valid proof; it is found first unless there is one."""
        proof = self._best()
        if proof is None:
            proof = await self._find(week_of(self._clock()))
        return proof.to_bytes()

    async def renew(self, use: Callable[[bytes], None]) -> None:
        """Find the next proofs in time, until cancelled; ``use`` is called with each new one to
        show."""
        used = self._best()
        while True:
            now = self._clock()
            week = week_of(now + RENEW_BEFORE)
            if all(proof.week < week for proof in self._proofs):
                await self._find(week)
            best = self._best()
            if best is not None and best != used:
                used = best
                use(best.to_bytes())
            await asyncio.sleep(CHECK_EVERY)

    def _best(self) -> Proof | None:
        """The newest proof whose week has begun, if it is still valid."""
        now = self._clock()
        good = [
            proof
            for proof in self._proofs
            if proof.week <= week_of(now) and is_good_in(proof.week, now)
        ]
        return max(good, key=lambda proof: proof.week, default=None)

    async def _find(self, week: int) -> Proof:
        search = _Search(self._rules, self._peer_id, week)
        took = await asyncio.to_thread(search.time_one)
        usual, hashes, began = 2**self._rules.work, 0, perf_counter()
        self._show(self._told(f"about {span(usual * took)} on this machine"))
        try:
            while search.found is None:
                hashes += await asyncio.to_thread(search.hash_on)
                spent = perf_counter() - began
                self._show(
                    self._told(
                        f"{hashes:,} hashes in {span(spent)}; {usual:,} are usual, about "
                        f"{span(usual * took)}"
                    )
                )
                took = spent / hashes
        finally:
            search.stop.set()  # also if we are cancelled: the thread ends at its next hash
            self._show(None)
        proof = Proof(week, search.found)
        self._keep(proof)
        return proof

    def _told(self, progress: str) -> str:
        return f"finding the proof of work that this run asks for once a week: {progress}"

    def _keep(self, proof: Proof) -> None:
        self._proofs = [*self._proofs, proof][-MAX_KEPT:]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, b"".join(proof.to_bytes() for proof in self._proofs), 0o600)

    def _read(self) -> list[Proof]:
        """The home's proofs. Damaged ones are found again."""
        try:
            data = (
                self._path.read_bytes()[: MAX_KEPT * PROOF_BYTES] if self._path is not None else b""
            )
        except OSError:
            return []
        whole = len(data) // PROOF_BYTES * PROOF_BYTES
        return [
            read_proof(data[start : start + PROOF_BYTES]) for start in range(0, whole, PROOF_BYTES)
        ]

    def _is_sound(self, proof: Proof) -> bool:
        good = (proof.week + 1) * WEEK + OVERLAP > self._clock()
        return good and zero_bits(self._rules.run_id, self._peer_id, proof) >= self._rules.work


class _Search:
    """Hashes from a random nonce on."""

    def __init__(self, rules: Rules, peer_id: str, week: int) -> None:
        self._rules = rules
        self._peer_id = peer_id
        self._week = week
        self._nonce = secrets.randbits(63)
        self.stop = threading.Event()
        self.found: int | None = None

    def time_one(self) -> float:
        """Seconds per hash on this machine."""
        began = perf_counter()
        for _ in range(3):
            self._hash()
        return (perf_counter() - began) / 3

    def hash_on(self) -> int:
        """Hash for CHUNK seconds; returns the number of hashes."""
        began, hashes = perf_counter(), 0
        while self.found is None and not self.stop.is_set() and perf_counter() < began + CHUNK:
            self._hash()
            hashes += 1
        return max(1, hashes)

    def _hash(self) -> None:
        self._nonce += 1
        if (
            zero_bits(self._rules.run_id, self._peer_id, Proof(self._week, self._nonce))
            >= self._rules.work
        ):
            self.found = self._nonce
