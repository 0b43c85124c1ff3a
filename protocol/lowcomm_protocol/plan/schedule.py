"""When each fragment is due, and how far it is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowcomm_protocol.plan.fragments import offset, sync_index


@dataclass(frozen=True)
class FragmentProgress:
    """The counters of one fragment. They never go back, except when older state is loaded."""

    version: int = 0
    """Outer steps applied."""
    merged_steps: int = 0
    """Own inner steps when the contribution of the last merge was captured: what came later is
    still to be shared."""
    merged_tokens: int = 0
    synced: int = -1
    """Sync index at the last merge, or at the last attempt that found no partner; -1 before the
    first."""


class SyncSchedule:
    """Which fragments are due at a swarm step.

    The swarm step can jump, so a fragment is due when its sync index has grown since its last sync,
    not only at the step itself.
    """

    def __init__(self, interval: int, progress: Sequence[FragmentProgress]) -> None:
        self.interval = interval
        self._progress = list(progress)

    def __getitem__(self, fragment: int) -> FragmentProgress:
        return self._progress[fragment]

    def __len__(self) -> int:
        return len(self._progress)

    def due(self, swarm_step: int) -> Iterable[int]:
        """The fragments that are due, the one that has waited longest first.

        None at swarm step 0, as nothing is learned yet.
        """
        late = [p for p in range(len(self)) if self.due_from(p) <= swarm_step]
        return sorted(late, key=lambda p: self._progress[p].merged_steps)

    def due_from(self, fragment: int) -> int:
        """The first swarm step at which a fragment is due."""
        synced = max(self._progress[fragment].synced, self.round_of(fragment, 0))
        return offset(fragment, len(self), self.interval) + (synced + 1) * self.interval

    def round_of(self, fragment: int, swarm_step: int) -> int:
        """Which sync of this fragment a swarm step belongs to."""
        return sync_index(swarm_step, fragment, len(self), self.interval)

    def intervals_since(self, fragment: int, steps: int) -> int:
        """How many intervals of own inner steps lie between the last merge of a fragment and
        ``steps``, rounded; 1 at least."""
        since = steps - self._progress[fragment].merged_steps
        return max(1, (2 * since + self.interval) // (2 * self.interval))

    def least_steps(self, fragment: int, least: int) -> int:
        """Own inner steps since the last merge of a fragment before another is accepted: ``least``
        of them.

        Before its first merge half of those at which it is first due are enough: it may be due long
        before ``least``, and who has done half as many as the caller brings progress of a
        comparable norm.
        """
        if self._progress[fragment].version:
            return least
        first = offset(fragment, len(self), self.interval) or self.interval
        return min(least, (first + 1) // 2)

    def steps_alone(self, steps: int) -> int:
        """Own inner steps since the last merge of any fragment, after ``steps`` of them."""
        return steps - max(progress.merged_steps for progress in self._progress)

    def skip(self, fragment: int, swarm_step: int) -> None:
        """Count a sync that found no partner: the fragment waits for its next sync point."""
        old = self._progress[fragment]
        self._progress[fragment] = replace(
            old, synced=max(old.synced, self.round_of(fragment, swarm_step))
        )

    def merged(self, fragment: int, swarm_step: int, steps: int, tokens: int) -> FragmentProgress:
        """Count a merge at ``swarm_step`` of a contribution captured after ``steps`` own inner
        steps on ``tokens``."""
        self.skip(fragment, swarm_step)
        old = self._progress[fragment]
        new = replace(old, version=old.version + 1, merged_steps=steps, merged_tokens=tokens)
        self._progress[fragment] = new
        return new
