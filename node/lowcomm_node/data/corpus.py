"""What becomes a pack: documents, each either trained on or held out.

Names or contents decide what is held out, not chance, so that peers with the same data evaluate on
the same text.
"""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from lowcomm_node.data.documents import Document, ReadOptions, SourceFile, TextFiles, cut_before
from lowcomm_node.data.sources import TEXT, expanded, find_files
from lowcomm_node.data.stories import HELD_OUT_EVERY, NAME, STORIES, tell
from lowcomm_node.errors import ConfigError, DataError

PYTHON_BYTES = 12 << 20
"""Bytes of ``builtin:python`` at most: enough for a demo, tokenized within a second."""
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "lib2to3"}
_SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}
LONG_BYTES = 256 << 10  # of a text file whose end is held out, instead of all of it or nothing
SHORTEST_TAIL = 4 << 10  # bytes of such an end
TAIL_SHARE = 100
_HELD_OUT_FILES = 20
_HELD_OUT_DOCUMENTS = 100
SMALLEST_SHARE, LARGEST_SHARE, HELD_OUT_BYTES = 1 / 1000, 1 / 20, 8 << 20
"""Share of the documents of a shared text that is held out: as many as make these bytes, within
these bounds."""
_SPLIT = re.compile(r"(^|[^a-z])(test|val|valid|validation)([^a-z]|$)")


@dataclass(frozen=True)
class BuiltinCorpus:
    """Text that every installation has, in memory."""

    name: str
    texts: Sequence[bytes]
    held_out: Sequence[bool]
    """Whether each of the texts is."""

    @property
    def origin(self) -> str:
        """The cache keeps one version of each."""
        return self.name

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return sum(map(len, self.texts))

    def fingerprint(self) -> str:
        """Changes when the text does."""
        return hashlib.sha256(b"\0".join(self.texts)).hexdigest()

    def documents(
        self, file: int = 0, place: int = 0, is_within: bool = False
    ) -> Iterator[tuple[int, Document]]:
        """Yield the rows of the one file, each a document, as `TextFiles` does."""
        read = sum(map(len, self.texts[:place]))
        for row in range(place, 0 if file or is_within else len(self.texts)):
            text = self.texts[row]
            read += len(text)
            yield 0, Document(text, b"", len(text), row + 1, read, held_out=self.held_out[row])


def python_corpus(root: Path) -> BuiltinCorpus:
    """Source text of Python's standard library; every 20th file, by name, is held out.

    Left out are other packages, and files that hold paths of this machine: equal Pythons have equal
    text. Raises DataError.
    """
    paths: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            name = path.relative_to(root).as_posix()
            if not path.name.startswith("_sysconfigdata") and not name.startswith("config-"):
                paths[name] = path
    texts, held_out, total = list[bytes](), list[bool](), 0
    for name in sorted(paths):
        text = paths[name].read_bytes()
        total += len(text)
        if total > PYTHON_BYTES:
            break
        texts.append(text)
        held_out.append(_is_chosen(hashlib.sha256(name.encode()).digest(), _HELD_OUT_FILES))
    if not texts:
        raise DataError(
            f"{root} holds no source text of Python: name a text of your own with --data PATH."
        )
    return BuiltinCorpus("builtin:python", texts, held_out)


@cache
def story_corpus() -> BuiltinCorpus:
    """All stories; every 20th is held out."""
    texts = [tell(number).encode() for number in range(STORIES)]
    return BuiltinCorpus(NAME, texts, [number % HELD_OUT_EVERY == 0 for number in range(STORIES)])


@dataclass(frozen=True)
class PrivateText(TextFiles):
    """Files of one kind named by the owner. Of a long text file the last hundredth is held out, of
    other documents one in 100, by content. At least one, or the end of one, is held out, with all
    its copies."""

    origin: str
    """The owner's choice. The cache keeps one version of each."""
    name: str
    """Kind and file name; safe to show, since it names no folder."""

    def documents(
        self, file: int = 0, place: int = 0, is_within: bool = False
    ) -> Iterator[tuple[int, Document]]:
        """Yield documents with their split, as `TextFiles` does."""
        spare = self._spare()
        for number, document in super().documents(file, place, is_within):
            is_spare = document.key == spare
            if self._is_long(document):
                tail = max(SHORTEST_TAIL, document.size // TAIL_SHARE)
                parts = _with_end_held_out(document, document.size - tail)
            elif is_spare and self.files[number].kind == TEXT:
                tail = max(SHORTEST_TAIL, self.size // TAIL_SHARE)
                parts = _with_end_held_out(document, max(document.size // 2, document.size - tail))
            else:
                held_out = is_spare or _is_chosen(document.key, _HELD_OUT_DOCUMENTS)
                parts = [replace(document, held_out=held_out)]
            for part in parts:
                yield number, part

    def _spare(self) -> bytes | None:
        """Key of the document to hold out if no other is."""
        smallest: bytes | None = None
        for _, document in super().documents():
            if self._is_long(document) or _is_chosen(document.key, _HELD_OUT_DOCUMENTS):
                return None
            smallest = min(smallest or document.key, document.key)
        return smallest

    def _is_long(self, document: Document) -> bool:
        return self.files[0].kind == TEXT and document.size >= LONG_BYTES


def _with_end_held_out(document: Document, end: int) -> list[Document]:
    """A part of a text of which all behind ``end`` is held out, as documents of their own."""
    assert document.place is not None
    left, text = end - (document.place - len(document.text)), document.text
    if not 0 < left <= len(text):
        return [replace(document, held_out=left <= 0)]
    cut = cut_before(text, min(left, len(text) - 1))
    learned = replace(document, text=text[:cut], place=None, ends=True)
    return [learned, replace(document, text=text[cut:], begins=True, held_out=True)]


@dataclass(frozen=True)
class SharedText(TextFiles):
    """Files that become a pack for others."""

    def documents(
        self, file: int = 0, place: int = 0, is_within: bool = False
    ) -> Iterator[tuple[int, Document]]:
        """Yield documents as `TextFiles` does; by hash some are held out, unless the text has
        a split for evaluation."""
        share = min(LARGEST_SHARE, max(SMALLEST_SHARE, HELD_OUT_BYTES / max(1, self.size)))
        below = 0 if any(source.is_split for source in self.files) else int(share * (1 << 64))
        is_first = not (file or place)  # which may be the only document
        for number, document in super().documents(file, place, is_within):
            is_chosen = int.from_bytes(document.key[:8]) < below and not is_first
            yield number, replace(document, held_out=is_chosen or self.files[number].is_split)
            is_first = False


Corpus = BuiltinCorpus | PrivateText | SharedText


def open_corpus(
    source: str, field: str = "text", end_token: int | None = None
) -> BuiltinCorpus | PrivateText:
    """``builtin:python``, ``builtin:stories``, or a file, folder or glob of one kind. ``text:``,
    ``jsonl:`` or ``parquet:`` before it selects the kind. Raises ConfigError."""
    if source == "builtin:python":
        return python_corpus(Path(sysconfig.get_path("stdlib")))
    if source == NAME:
        return story_corpus()
    if source.startswith("builtin:"):
        raise ConfigError(
            f"data source = {source!r} is not known: use builtin:python, builtin:stories, or "
            "--data PATH."
        )
    kind, files = find_files(source)
    name = f"{kind}:{PurePosixPath(source.removeprefix(f'{kind}:')).name}"
    chosen = tuple(SourceFile(kind, file) for file in files)
    return PrivateText(chosen, ReadOptions(field, end_token=end_token), source, name)


def find_text(sources: Sequence[str], options: ReadOptions) -> SharedText:
    """The files of the owner's sources, those of a split for evaluation first, so that what they
    hold is left out of the others. Raises ConfigError."""
    files: list[SourceFile] = []
    for source in sources:
        kind, paths = find_files(source)
        root = expanded(source.removeprefix(f"{kind}:"))
        for path in paths:
            inside = path.relative_to(root).as_posix() if root.is_dir() else path.name
            is_split = kind != TEXT and _SPLIT.search(inside.lower()) is not None
            files.append(SourceFile(kind, path, is_split))
    if all(file.is_split for file in files):
        files = [replace(file, is_split=False) for file in files]
    return SharedText(tuple(sorted(files, key=lambda file: not file.is_split)), options)


def _is_chosen(key: bytes, every: int) -> bool:
    """Whether a document of this digest is held out, as one of ``every`` is."""
    return int.from_bytes(key) % every == 0
