"""What this node announces of itself: a record that lasts, and a pulse."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import time

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.pulse import Pulse, write_pulse
from lowcomm_protocol.peers.records import (
    MAX_ENTRY_POINTS,
    PeerInfo,
    Phase,
    SelfReport,
    is_from_future,
    read_record,
    write_record,
)


@dataclass(kw_only=True)
class OwnRecord:
    """What this node announces of itself."""

    identity: Identity
    run_id: str
    certificate: bytes
    """Key of our TLS certificate."""
    addresses: tuple[str, ...]
    """``host:port`` of our Exchange service."""
    progress: Callable[[], tuple[int, int, float]]
    """Swarm step, own inner steps, tokens a second."""
    report: Callable[[], SelfReport] = SelfReport
    """What people see of us."""
    reading: Callable[[], bytes] = bytes
    """Pieces of packed text that we claim."""
    gives_text: Callable[[], bool] = lambda: False
    """Whether the whole of the run's packed text is here."""
    phase: Phase = Phase.JOINING
    last_issued: float = 0.0
    _signed: tuple[PeerInfo, bytes] | None = None
    """The current record."""

    def follow(self, data: bytes, continues: bool) -> bool:
        """Whether a record under our peer id is newer than our last one.

        ``continues``: it may be ours from before a restart, so new ones are issued after it, or a
        clock set back would make them look outdated. Otherwise another process has our identity.
        """
        with suppress(LowcommError):
            info = read_record(data, time())
            if info.peer_id == self.identity.peer_id and info.issued > self.last_issued:
                self.last_issued = info.issued if continues else self.last_issued
                return True
        return False

    def record(
        self, life: float, entry_points: tuple[str, ...], claim: bytes, pause: float = 0.0
    ) -> bytes:
        """Our SignedRecord, serialized, which is valid for ``life`` seconds from its issue.

        It is signed again when what lasts changes, or ``pause`` seconds have passed.
        """
        swarm_step, steps, speed = self.progress()
        now, report = time(), self.report()
        info = PeerInfo(
            peer_id=self.identity.peer_id,
            run_id=self.run_id,
            phase=self.phase,
            issued=now,
            expires=now + life,
            addresses=self.addresses,
            certificate=self.certificate,
            gives_text=self.gives_text(),
            swarm_step=swarm_step,
            steps=steps,
            tokens_per_second=speed,
            entry_points=entry_points[:MAX_ENTRY_POINTS],
            claim=claim,
            reading=self.reading(),
            report=report,
        )
        if self._signed is not None:
            before, data = self._signed
            if 0 <= now - before.issued < pause and _lasting(before) == _lasting(info):
                return data
        # The later of two records wins, so none is issued before the last, unless the clock was
        # ahead when that was issued.
        last = self.last_issued
        self.last_issued = round(now if is_from_future(last, now) else max(now, last + 0.001), 3)
        info = replace(info, issued=self.last_issued, expires=self.last_issued + life)
        self._signed = info, write_record(info, self.identity)
        return self._signed[1]

    def pulse(self, bits: int) -> bytes:
        """Our serialized pulse of this moment; ``bits``: depth of our shard."""
        swarm_step, steps, speed = self.progress()
        report = self.report()
        pulse = Pulse(
            peer_id=self.identity.peer_id,
            issued=time(),
            phase=self.phase,
            swarm_step=swarm_step,
            steps=steps,
            tokens_per_second=speed,
            tokens=report.tokens,
            held_out_loss=report.held_out_loss,
            exchanges=report.exchanges,
            reading=self.reading(),
            gives_text=self.gives_text(),
            bits=bits,
        )
        return write_pulse(pulse, self.run_id, self.identity)


def _lasting(info: PeerInfo) -> tuple[object, ...]:
    """What others must learn at once when it changes."""
    report = info.report
    return (
        *(info.phase, info.addresses, info.certificate, info.entry_points, info.claim),
        *(info.gives_text, report.name, report.release),
    )
