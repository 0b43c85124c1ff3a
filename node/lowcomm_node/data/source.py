"""What a source of text is: documents one at a time, each either trained on or held out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lowcomm_node.data.documents import Reading


@dataclass(frozen=True)
class Document:
    """A text, or a part of a long one."""

    text: bytes
    held_out: bool
    ends: bool = True
    """Whether the text ends here, rather than in the next part."""
    file: Path | None = None
    """The owner's file that it comes from."""


class Corpus(Protocol):
    """A source of text."""

    @property
    def name(self) -> str:
        """Kind and file name; safe to show, since it names no folder."""
        ...

    @property
    def origin(self) -> str:
        """The owner's choice. The cache keeps one version of each."""
        ...

    def fingerprint(self) -> str:
        """Changes when the text does."""
        ...

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        ...

    def documents(self, reading: Reading | None = None) -> Iterator[Document]:
        """All documents, always in the same order, with bounded memory; ``reading`` follows.

        Raises DataError.
        """
        ...
