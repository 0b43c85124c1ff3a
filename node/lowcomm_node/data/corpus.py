"""Sources of text: documents one at a time, each either trained on or held out.

A remote run can only choose what is built in or leave the choice to each owner; paths come from the
owner alone. Names or contents decide what is held out, not chance, so that peers with the same
data evaluate on the same text.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path, PurePosixPath

from lowcomm_node.data import documents
from lowcomm_node.data.documents import JSONL, TEXT, Document, ReadProgress
from lowcomm_node.data.stories import HELD_OUT_EVERY, NAME, STORIES, tell
from lowcomm_node.errors import ConfigError, DataError

PYTHON_BYTES = 12 << 20
"""Bytes of ``builtin:python`` at most: enough for a demo, tokenized within a second."""
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "lib2to3"}
_SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_FILES = 20
_HELD_OUT_DOCUMENTS = 100


@dataclass(frozen=True)
class BuiltinCorpus:
    """Text that every installation has, in memory."""

    name: str
    version: str
    texts: Sequence[Document]

    @property
    def origin(self) -> str:
        return self.name

    def fingerprint(self) -> str:
        return self.version

    @property
    def size(self) -> int:
        return sum(len(document.text) for document in self.texts)

    def documents(self, reading: ReadProgress | None = None) -> Iterator[Document]:
        reading = reading or ReadProgress()
        for document in self.texts:
            reading.at(len(document.text), is_end=True)
            yield document


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
    texts: list[Document] = []
    sizes: list[tuple[str, int]] = []
    total = 0
    for name in sorted(paths):
        text = paths[name].read_bytes()
        total += len(text)
        if total > PYTHON_BYTES:
            break
        sizes.append((name, len(text)))
        texts.append(Document(text, _hash(name.encode()) % _HELD_OUT_FILES == 0))
    if not texts:
        raise DataError(
            f"{root} holds no source text of Python: name a text of your own with --data PATH."
        )
    version = _digest(["python", platform.python_version(), sizes])
    return BuiltinCorpus("builtin:python", version, texts)


@cache
def story_corpus() -> BuiltinCorpus:
    """All stories; every 20th is held out."""
    texts = [tell(number).encode() for number in range(STORIES)]
    documents = [Document(text, number % HELD_OUT_EVERY == 0) for number, text in enumerate(texts)]
    return BuiltinCorpus(NAME, hashlib.sha256(b"".join(texts)).hexdigest(), documents)


@dataclass(frozen=True)
class FileCorpus:
    """Files of one kind named by the owner. Of a long text file the last hundredth is held out, of
    other documents one in 100, by content."""

    kind: str
    origin: str
    """The owner's choice. The cache keeps one version of each."""
    name: str
    """Kind and file name; safe to show, since it names no folder."""
    files: tuple[Path, ...]
    field: str

    def fingerprint(self) -> str:
        """Changes when the text does."""
        # Size and modification time stand for the content: reading terabytes at each start would
        # take too long.
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return _digest([self.kind, self.field, stats])

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self, reading: ReadProgress | None = None) -> Iterator[Document]:
        """All documents, always in the same order. At least one, or the end of one, is held out,
        with all its copies. Raises DataError."""
        spare = self._spare()
        for document in self._texts(reading or ReadProgress()):
            if document.held_out is not None:
                yield document
                continue
            text, number = document.text, _hash(document.text)
            held_out, end = number % _HELD_OUT_DOCUMENTS == 0, len(text)
            if number == spare and self.kind == TEXT:
                tail = max(documents.SHORTEST_TAIL, self.size // documents.TAIL_SHARE)
                end = documents.cut_before(text, max(end // 2, end - tail))
            parts = [(text[:end], held_out or (number == spare and self.kind != TEXT))]
            parts += [(text[end:], True)] if text[end:] else []
            for content, out in parts:
                for part, is_last in documents.in_parts(BytesIO(content)):
                    yield Document(part, out, is_last, document.file)

    def _spare(self) -> int | None:
        """The hash of the document to hold out if no other is."""
        smallest: int | None = None
        for document in self._texts(ReadProgress()):
            number = _hash(document.text)
            if document.held_out is not None or number % _HELD_OUT_DOCUMENTS == 0:
                return None
            smallest = number if smallest is None else min(smallest, number)
        return smallest

    def _texts(self, reading: ReadProgress) -> Iterator[Document]:
        if self.kind == TEXT:
            return documents.read_text(self.files, reading)
        read = documents.read_jsonl if self.kind == JSONL else documents.read_columns
        return read(self.files, self.field, reading)


Corpus = BuiltinCorpus | FileCorpus


def open_corpus(source: str, field: str = "text") -> Corpus:
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
    wanted, path = documents.kind_and_path(source)
    kind, files = documents.choose(path, wanted)
    if not files:
        raise ConfigError(
            f"data source = {source!r} names no {kind} file: check the path that --data gives."
        )
    return FileCorpus(kind, source, f"{kind}:{PurePosixPath(path).name}", tuple(files), field)


def _hash(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(key).digest())


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
