"""Tables of what a run can choose by name. Any package may register more entries.

An entry may be the text ``module:name`` in place of the object. It is then imported when it is
first used, so that a bootstrap server, which checks names and computes nothing, loads no numba and
no torch.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from lowcomm_protocol.errors import SpecError

Entry = TypeVar("Entry")


class Table(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in the order in which they were registered."""

    def __init__(self, what: str, entries: Mapping[str, Entry | str]) -> None:
        self.what = what
        """What an entry is called in errors."""
        self._entries: dict[str, Entry | str] = dict(entries)

    def register(self, name: str, entry: Entry | str) -> None:
        """Add an entry. Raises SpecError if the name is taken."""
        if name in self._entries:
            raise SpecError(f"{self.what} {name!r} is registered already: choose another name.")
        self._entries[name] = entry

    def unregister(self, name: str) -> None:
        """Remove an entry. Raises SpecError if there is none."""
        self.check(name)
        del self._entries[name]

    def check(self, name: str) -> None:
        """Raise SpecError, which lists what there is, unless there is an entry of this name."""
        if name not in self._entries:
            raise SpecError(f"{self.what} {name[:80]!r} is {self.unknown(name)}")

    def unknown(self, name: str) -> str:
        """What an error says of a name that is not here: the nearest one, and all there are."""
        near = get_close_matches(name[:80], self._entries, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"not known{meant} There are {', '.join(self._entries)}"

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = cast("Entry", load(entry))
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def load(where: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
