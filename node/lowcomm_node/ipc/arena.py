"""Shared memory in slots: where coded fragments pass between the daemon and its trainer.

The memory is an anonymous file that both processes hold open. It has no name that could be left
behind, and it is gone with the last of the two, also after SIGKILL. Pages are taken only when a
slot is written for the first time.
"""

import mmap
import os
import tempfile


def create_file() -> int:
    """An anonymous memory file of size 0; the descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lowcomm-fragments", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # without memfd: a file whose name is gone
        return os.dup(file.fileno())


class Arena:
    """``slots`` pieces of ``slot_bytes`` bytes; only the daemon takes them and gives them back."""

    def __init__(self, descriptor: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        size = max(1, slots * slot_bytes)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        self._view = memoryview(self._map)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """How many slots can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free slots; none where there are fewer."""
        return [self._free.pop() for _ in range(count)] if count <= self.free else []

    def give_back(self, slot: int) -> None:
        """Return a slot. Its bytes may be overwritten from now on."""
        if slot in self._free:
            raise ValueError(f"Slot {slot} was given back twice.")
        self._free.append(slot)

    def view(self, slot: int, size: int) -> memoryview:
        """The first ``size`` bytes of a slot, writable, not copied."""
        if size > self.slot_bytes:
            raise ValueError(f"{size} bytes do not fit into a slot of {self.slot_bytes}.")
        return self._view[slot * self.slot_bytes : slot * self.slot_bytes + size]

    def close(self) -> None:
        """Unmap. Views that are still held keep the mapping until they are gone."""
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            return
