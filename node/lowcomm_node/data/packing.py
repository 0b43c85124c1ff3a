"""Packing: documents become a pack, once, whatever interrupts it.

.OUT.pack.packing/
  train, held_out   tokens so far, without padding
  parts             of each part of a training document its heap and its bytes, 8 bytes in all
  shuffled          training tokens, heap after heap
  journal           SQLite: how far all of that is, and 8 bytes of the digest of each document

The journal takes some 20 bytes of disk a document, and 64 MiB of memory however many there are.
All files are cut to its sizes before packing goes on, so a kill loses a second of work.

Neighbours in a source are alike, and a model that reads them together forgets the rest
(docs/methods.md). So the digest of a document says on which of 256 heaps it comes, and each heap is
a sample of the whole source. A private text, whose windows are drawn at random, keeps its order.
"""

import json
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.chat import encode_chat
from lowcomm_node.data.corpus import Corpus
from lowcomm_node.data.documents import Document
from lowcomm_node.data.pack import Pack, PackTokenizer, Show, seal, token_type
from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer, check_of
from lowcomm_node.errors import ConfigError, DataError, DiskFull
from lowcomm_node.storage.files import disk_full_error, folder_lock
from lowcomm_protocol.identity import Identity

FORMAT = 3
HEAPS = 256
SAVE_SECONDS = 1.0
"""Work that a kill loses, beside that of the batches in hand."""
BATCH_BYTES = (256 << 10) * (os.cpu_count() or 1)
"""Bytes of text that are tokenized at once: about a second."""
IN_HAND = 3
"""Batches that are read or tokenized at a time."""
LARGEST_END = 16 << 20
"""Tokens held out at most where no document is."""
_LINE_END = b"\n"
_COUNTED = ("documents", "held_out_documents", "duplicates")
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA cache_size = -65536;
CREATE TABLE IF NOT EXISTS seen (key INTEGER PRIMARY KEY, number INTEGER);
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, content TEXT);
"""


@dataclass(frozen=True)
class PackingState:
    """How far packing is."""

    file: int = 0
    place: int = 0
    """Offset in that file to go on from."""
    is_within: bool = False
    """Whether that place is within a document."""
    held_out: bool = False
    """Whether that document is held out."""
    heap: int = 0
    """Heap of that document."""
    parts: int = 0
    """Parts of training documents, whose tokens are ``train_bytes``."""
    train_bytes: int = 0
    held_out_bytes: int = 0
    documents: int = 0
    held_out_documents: int = 0
    duplicates: int = 0
    is_whole: bool = False


@dataclass(frozen=True)
class _Batch:
    documents: list[Document]
    heaps: list[int]
    after: PackingState
    """How far packing is with it; the sizes are those before."""


_Encoded = tuple[bytes, bytes, bytes]
"""Tokens of training and of held-out text, and the parts of training documents."""


class Packer:
    """Packs a text into one file. ``pack`` may be called again, by another process, after a
    crash."""

    def __init__(
        self,
        text: Corpus,
        path: Path,
        tokenizer: Tokenizer,
        maker: Identity | None,
        *,
        is_masked: bool = False,
    ) -> None:
        """``maker``: the signer; None makes a private pack, which keeps copies of documents;
        ``is_masked``: the documents are conversations. Raises ConfigError."""
        if path.exists():
            raise ConfigError(f"{path} exists: name another file, or remove it.")
        self.folder = path.with_name(f".{path.name}.packing")
        self._text, self._path, self._tokenizer, self._maker = text, path, tokenizer, maker
        self._is_masked = is_masked
        self._type = token_type(tokenizer.vocab, is_masked)

    def pack(
        self,
        facts: Mapping[str, Any] | None = None,
        show: Callable[[str], Show] = lambda _: lambda *_: None,
        piece_bytes: int | None = None,
    ) -> Pack:
        """Read, tokenize, hash; ``facts``: licence and words of the description. Raises
        ConfigError, DataError, DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self._tokenizer
        is_file = isinstance(tokenizer, FileTokenizer)
        named = PackTokenizer(
            name=cast("Any", "local" if is_file else tokenizer.name),
            sha256=tokenizer.sha256 if is_file else "",
            vocab=tokenizer.vocab,
            begin_tokens=tokenizer.begins,
            end_token=tokenizer.separator,
        )
        begun = [FORMAT, self._text.fingerprint(), tokenizer.name, tokenizer.vocab]
        fingerprint = sha256(json.dumps([*begun, check_of(tokenizer)]).encode()).hexdigest()
        with folder_lock(self.folder, wait=False) as is_ours, disk_full_error(self.folder):
            if not is_ours:
                raise ConfigError(f"{self.folder} is in use: another process packs {self._path}.")
            with _Journal(self.folder / "journal", fingerprint) as journal:
                state = journal.state
                if not state.is_whole:
                    state = self._tokenize(journal, show("packing"))
            if not (state.train_bytes and state.held_out_bytes):
                raise DataError(
                    f"{self._path.name} would have too little text to hold any of it out: give it "
                    "at least two documents."
                )
            facts = {**(facts or {}), **{name: getattr(state, name) for name in _COUNTED}}
            train = "shuffled" if self._maker else "train"
            if self._maker:
                self._shuffle(state, show("shuffling"))
            sizes = state.train_bytes, state.held_out_bytes
            pack = seal(
                *(self._path, self.folder / train, sizes, self._maker, named, piece_bytes),
                *(self._is_masked, facts, show("hashing")),
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        return pack

    def _tokenize(self, journal: "_Journal", show: Show) -> PackingState:
        """Read and tokenize what is left, and return how far all of it is."""
        state, saved, width = journal.state, monotonic(), self._type.itemsize
        with (
            _opened(self.folder / "train", state.train_bytes) as train,
            _opened(self.folder / "held_out", state.held_out_bytes) as held_out,
            _opened(self.folder / "parts", 8 * state.parts) as parts,
        ):

            def save() -> None:
                for file in (train, held_out, parts):
                    file.flush()
                    os.fsync(file.fileno())
                journal.save(state)

            for batch, (learned, tested, sizes) in self._encoded(self._batches(journal)):
                state = replace(
                    batch.after,
                    parts=state.parts + len(sizes) // 8,
                    train_bytes=state.train_bytes + len(learned),
                    held_out_bytes=state.held_out_bytes + len(tested),
                )
                read = batch.documents[-1].read if batch.documents else self._text.size
                tokens = (state.train_bytes + state.held_out_bytes) // width
                show(min(read, self._text.size), self._text.size, tokens)
                train.write(learned)
                held_out.write(tested)
                parts.write(sizes)
                if monotonic() > saved + SAVE_SECONDS:
                    save()
                    saved = monotonic()
            if not state.held_out_bytes:  # the last hundredth of the tokens is
                train.flush()
                size = min(LARGEST_END, -(-state.train_bytes // width // 100)) * width
                with (self.folder / "train").open("rb") as file:
                    file.seek(state.train_bytes - size)
                    held_out.write(file.read(size))
                state = replace(state, train_bytes=state.train_bytes - size, held_out_bytes=size)
            state = replace(state, is_whole=True)
            save()
        return state

    def _shuffle(self, state: PackingState, show: Show) -> None:
        """Write the training tokens heap after heap."""
        with (
            (self.folder / "train").open("rb") as train,
            (self.folder / "shuffled").open("wb") as shuffled,
        ):
            for heap in range(HEAPS):
                place, left = 0, state.parts
                with (self.folder / "parts").open("rb") as file:
                    while left:
                        parts = np.fromfile(file, "<u8", min(left, 1 << 20))
                        ends = np.minimum(place + np.cumsum(parts >> 8), state.train_bytes)
                        for part in np.flatnonzero(parts & 0xFF == heap):
                            start = int(ends[part - 1]) if part else place
                            shuffled.write(os.pread(train.fileno(), int(ends[part]) - start, start))
                        place, left = int(ends[-1]), left - len(parts)
                done = shuffled.tell()
                show(done, state.train_bytes, done // self._type.itemsize)

    def _batches(self, journal: "_Journal") -> Iterator[_Batch]:
        """Documents that are new, several at a time, and how far reading is after each batch."""
        state, batch, size, heaps = journal.state, list[Document](), 0, list[int]()
        number, held_out, heap, is_copy = state.file, state.held_out, state.heap, False
        counts = {name: getattr(state, name) for name in _COUNTED}
        for number, document in self._text.documents(state.file, state.place, state.is_within):
            if document.begins:
                order, held_out = sum(counts.values()), document.held_out
                heap = document.key[0] if self._maker else 0
                is_copy = self._maker is not None and not journal.is_new(document.key, order)
                kept = "held_out_documents" if held_out else "documents"
                counts["duplicates" if is_copy else kept] += 1
            if is_copy:
                continue
            batch.append(document if document.begins else replace(document, held_out=held_out))
            heaps.append(heap)
            size += len(document.text)
            if document.place is not None and size >= BATCH_BYTES:
                reached = {"file": number, "place": document.place, "is_within": not document.ends}
                after = replace(state, held_out=held_out, heap=heap, **reached, **counts)
                yield _Batch(batch, heaps, after)
                batch, heaps, size = [], [], 0
        after = replace(state, file=number + 1, place=0, is_within=False, **counts)
        yield _Batch(batch, heaps, after)

    def _encoded(self, batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, _Encoded]]:
        """Batches and their tokens in order, several of them in hand."""
        in_hand = deque[tuple[_Batch, Future[_Encoded]]]()
        with ThreadPoolExecutor(IN_HAND - 1) as pool:
            for batch in batches:
                in_hand.append((batch, pool.submit(self._encode, batch)))
                if len(in_hand) == IN_HAND:
                    batch, future = in_hand.popleft()
                    yield batch, future.result()
            for batch, future in in_hand:
                yield batch, future.result()

    def _encode(self, batch: _Batch) -> _Encoded:
        made: list[NDArray[Any]] = []
        for is_tokens, group in groupby(batch.documents, lambda document: document.is_tokens):
            alike = list(group)
            if is_tokens:
                made += [_checked(document, self._tokenizer) for document in alike]
            elif self._is_masked and isinstance(self._tokenizer, FileTokenizer):
                made += encode_chat(self._tokenizer, [document.text for document in alike])
            else:
                made += _encode_text(self._tokenizer, alike)
        splits: tuple[list[bytes], list[bytes]] = ([], [])
        parts: list[int] = []
        for document, heap, tokens in zip(batch.documents, batch.heaps, made, strict=True):
            data = tokens.astype(self._type).tobytes()
            splits[document.held_out].append(data)
            if not document.held_out:
                parts.append(len(data) << 8 | heap)
        return b"".join(splits[0]), b"".join(splits[1]), np.array(parts, "<u8").tobytes()


def _checked(document: Document, tokenizer: Tokenizer) -> NDArray[Any]:
    """Tokens that were made before. Raises DataError if the tokenizer has no such token."""
    tokens, end = np.frombuffer(document.text, "<u4"), tokenizer.separator
    if len(tokens) and int(tokens.max()) >= tokenizer.vocab:
        raise DataError(
            f"{document.file} holds token {tokens.max()}, and {tokenizer.file} has "
            f"{tokenizer.vocab}: name the tokenizer that it was made with by --tokenizer."
        )
    return np.append(tokens, np.uint32(end)) if document.ends and end is not None else tokens


def _encode_text(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[NDArray[Any]]:
    """The tokens of documents, with those around each. A later part of a text is encoded behind a
    line end, as many tokenizers put a blank before a beginning. Raises DataError."""
    for document in documents if isinstance(tokenizer, FileTokenizer) else ():
        try:
            document.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{document.file} is not UTF-8 (byte 0x{document.text[error.start]:02x}): convert "
                "it, such as by `iconv -f WINDOWS-1252 -t UTF-8`, or remove it."
            ) from None
    encoded = tokenizer.encode_all(
        [(b"" if document.begins else _LINE_END) + document.text for document in documents]
    )
    line_end = [] if all(document.begins for document in documents) else tokenizer.encode(_LINE_END)
    none = np.array([], np.uint32)
    before = np.array(tokenizer.begins, np.uint32)
    after = none if tokenizer.separator is None else np.array([tokenizer.separator], np.uint32)
    whole: list[NDArray[Any]] = []
    for document, tokens in zip(documents, encoded, strict=True):
        if not document.begins:
            is_whole = np.array_equal(tokens[: len(line_end)], line_end)
            tokens = tokens[len(line_end) :] if is_whole else tokenizer.encode(document.text)
        parts = [before if document.begins else none, tokens, after if document.ends else none]
        whole.append(np.concatenate(parts))
    return whole


def _opened(path: Path, size: int) -> BinaryIO:
    """A file to append to, cut to ``size`` bytes."""
    path.touch()
    os.truncate(path, size)
    return path.open("ab")


class _Journal:
    """How far packing is, and which documents it has seen."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Raises ConfigError if it is of other sources or options, or damaged."""
        self._database = sqlite3.connect(path)
        self._path, self._fingerprint = path, fingerprint
        with self._explained():
            self._database.executescript(_TABLES)
            row = self._database.execute("SELECT content FROM state").fetchone()
        content: dict[str, Any] = json.loads(row[0]) if row else {"fingerprint": fingerprint}
        if content.pop("fingerprint") != fingerprint:
            self._database.close()
            raise ConfigError(
                f"{path.parent} was begun with other files or options: give the same again, or "
                "remove that folder."
            )
        self.state = PackingState(**content)

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def is_new(self, key: bytes, number: int) -> bool:
        """Whether the key is new to documents before this number. A restart reads again what was
        not packed before a crash, with the same numbers."""
        short = int.from_bytes(key[:8], signed=True)
        with self._explained():
            insert = "INSERT OR IGNORE INTO seen VALUES (?, ?)"
            if self._database.execute(insert, (short, number)).rowcount:
                return True
            row = self._database.execute("SELECT number FROM seen WHERE key = ?", (short,))
            return row.fetchone()[0] == number

    def save(self, state: PackingState) -> None:
        """Note how far packing is, and the keys of documents read since."""
        content = json.dumps({**asdict(state), "fingerprint": self._fingerprint})
        with self._explained(), self._database:
            self._database.execute("INSERT OR REPLACE INTO state VALUES (0, ?)", (content,))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise DiskFull(
                f"{self._path} can't be written ({error}): free some space there, and go on by the "
                "same command."
            ) from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self._path} is damaged ({error}): remove its folder to begin again."
            ) from None
