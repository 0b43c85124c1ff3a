"""Packing: documents of the owner's files become a pack, once, whatever interrupts it.

.OUT.pack.packing/
  train, held_out   tokens so far, without padding
  journal           SQLite: how far all of that is, and 8 bytes of the digest of each document

The journal takes some 14 bytes of disk a document, and 64 MiB of memory however many there are.
Both files are cut to its sizes before packing goes on, so a kill loses a second of work.
"""

import json
import os
import re
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, cast

import numpy as np

from lowcomm_node.data import documents, shards
from lowcomm_node.data.chat import ChatTemplate, encode_chat
from lowcomm_node.data.documents import ARROW, JSONL, PARQUET, TEXT, TOKENS, Document, ReadProgress
from lowcomm_node.data.pack import Pack, PackTokenizer, Show, seal, token_type
from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer, check_of
from lowcomm_node.errors import ConfigError, DataError, DiskFull
from lowcomm_node.storage.files import disk_full_error, folder_lock
from lowcomm_protocol.identity import Identity

FORMAT = 1
SAVE_SECONDS = 1.0
"""Work that a kill loses, beside that of the batches in hand."""
IN_HAND = 3
"""Batches that are read or tokenized at a time."""
SMALLEST_SHARE, LARGEST_SHARE, HELD_OUT_BYTES = 1 / 1000, 1 / 20, 8 << 20
"""Share of the documents that is held out: as many as make these bytes, within these bounds."""
_HELD_OUT_FILE = re.compile(r"(^|[^a-z])(test|val|valid|validation)([^a-z]|$)")
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA cache_size = -65536;
CREATE TABLE IF NOT EXISTS seen (key INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, content TEXT);
"""


@dataclass(frozen=True)
class SourceFile:
    """A file to pack."""

    kind: str
    path: Path
    held_out: bool
    """Whether its name, or its folder's in a dataset, says that it is a split for evaluation."""


@dataclass(frozen=True)
class PackingOptions:
    """What makes a pack, beside its files."""

    tokenizer: Tokenizer
    column: str = "text"
    separator: str = ""
    """Text between the documents of a text file; empty: a file is a document."""
    chat: ChatTemplate | None = None
    """Reads the column as conversations, of which answers alone are learned; needs a file's
    tokenizer."""


@dataclass(frozen=True)
class PackingState:
    """How far packing is."""

    file: int = 0
    place: int = 0
    """Offset in that file to resume from."""
    continues: bool = False
    """Whether the document before that place goes on behind it."""
    held_out: bool = False
    """Whether that document is held out."""
    train_bytes: int = 0
    held_out_bytes: int = 0
    documents: int = 0
    held_out_documents: int = 0
    duplicates: int = 0


@dataclass
class _Batch:
    kind: str
    continues: bool
    """Whether its first document began in an earlier batch."""
    after: PackingState
    """How far packing is with it; the sizes are those before."""
    texts: list[Document] = field(default_factory=list[Document])
    keys: list[int] = field(default_factory=list[int])
    size: int = 0


def find_sources(names: Sequence[str]) -> list[SourceFile]:
    """The files of the owner's sources, those of an evaluation split first, so that what they hold
    is left out of the others. Raises ConfigError."""
    sources: list[SourceFile] = []
    for name in names:
        wanted, path = documents.kind_and_path(name)
        files: Sequence[Path] = documents.find_files(path)
        if files and all(file.suffix == ".bin" for file in files):
            kind = TOKENS
        else:
            kind, files = documents.choose(path, wanted)
        if not files:
            raise ConfigError(f"{name} names no {kind} file: check the path.")
        root = documents.expanded(path)
        for file in files:
            inside = file.relative_to(root).as_posix() if root.is_dir() else file.name
            split = kind != TEXT and _HELD_OUT_FILE.search(inside.lower()) is not None
            sources.append(SourceFile(kind, file, split))
    return sorted(sources, key=lambda source: not source.held_out)


class Packer:
    """Packs sources into one file. ``pack`` may be called again, by another process, after a
    crash."""

    def __init__(self, sources: Sequence[SourceFile], path: Path, options: PackingOptions) -> None:
        """Raises ConfigError."""
        if path.exists():
            raise ConfigError(f"{path} exists: name another file, or remove it.")
        tokenizer = options.tokenizer
        self.folder = path.with_name(f".{path.name}.packing")
        self._sources, self._path, self._options = sources, path, options
        self._type = token_type(tokenizer.vocab, masked=options.chat is not None)
        self._sizes = [source.path.stat().st_size for source in sources]
        share = min(LARGEST_SHARE, max(SMALLEST_SHARE, HELD_OUT_BYTES / max(1, sum(self._sizes))))
        # Where a dataset has a split of its own, nothing else is held out.
        has_split = any(source.held_out for source in sources)
        self._held_out_below = 0 if has_split else int(share * (1 << 64))
        self._keys = set[int]()  # of documents in hand, which are not in the journal yet
        self._read_bytes = 0

    def pack(
        self,
        maker: Identity,
        facts: Mapping[str, Any],
        show: Callable[[str], Show] = lambda _: lambda *_: None,
        piece_bytes: int | None = None,
    ) -> Pack:
        """Read, tokenize, hash; ``facts``: licence and words of the description. Raises
        ConfigError, DataError, DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer, is_masked = self._options.tokenizer, self._options.chat is not None
        is_file = isinstance(tokenizer, FileTokenizer)
        named = PackTokenizer(
            name=cast("Any", "local" if is_file else tokenizer.name),
            sha256=tokenizer.sha256 if is_file else "",
            vocab=tokenizer.vocab,
            begin_tokens=tokenizer.begins,
            end_token=tokenizer.separator,
        )
        with folder_lock(self.folder, wait=False) as is_ours, disk_full_error(self.folder):
            if not is_ours:
                raise ConfigError(f"{self.folder} is in use: another process packs {self._path}.")
            with _Journal(self.folder / "journal", self._fingerprint()) as journal:
                state = self._tokenize(journal, show("packing"))
            counted = ("documents", "held_out_documents", "duplicates")
            facts = {**facts, **{name: getattr(state, name) for name in counted}}
            pack = seal(
                *(self._path, self.folder, maker, named, piece_bytes, is_masked),
                facts,
                show("hashing"),
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        return pack

    def _fingerprint(self) -> str:
        """Changes when sources or options do."""
        options = self._options
        tokenizer = options.tokenizer
        stats = [
            (source.kind, str(source.path), source.held_out, size, source.path.stat().st_mtime_ns)
            for source, size in zip(self._sources, self._sizes, strict=True)
        ]
        parts = [FORMAT, stats, options.column, options.separator, tokenizer.name, tokenizer.vocab]
        parts += [check_of(tokenizer), options.chat.source if options.chat else ""]
        return sha256(json.dumps(parts).encode()).hexdigest()

    def _tokenize(self, journal: "_Journal", show: Show) -> PackingState:
        """Read and tokenize what is left, and return how far all of it is."""
        state, total = journal.state, sum(self._sizes)
        if journal.is_whole:
            return state
        saved, keys = monotonic(), list[int]()
        with (
            _opened(self.folder / "train", state.train_bytes) as train,
            _opened(self.folder / "held_out", state.held_out_bytes) as held_out,
            ThreadPoolExecutor(IN_HAND - 1) as pool,
        ):

            def save(is_whole: bool) -> None:
                for file in (train, held_out):
                    file.flush()
                    os.fsync(file.fileno())
                journal.save(state, keys, is_whole)
                self._keys.difference_update(keys)
                keys.clear()

            in_hand = deque[tuple[_Batch, Future[tuple[bytes, bytes]]]]()
            batches = self._batches(state, journal)
            while True:
                batch = next(batches, None)
                if batch is not None:
                    in_hand.append((batch, pool.submit(self._encode, batch)))
                if not in_hand:
                    break
                if batch is not None and len(in_hand) < IN_HAND:
                    continue
                written, future = in_hand.popleft()
                sizes = [state.train_bytes, state.held_out_bytes]
                for place, data in enumerate(future.result()):
                    sizes[place] += (train, held_out)[place].write(data)
                state = replace(written.after, train_bytes=sizes[0], held_out_bytes=sizes[1])
                keys += written.keys
                show(min(self._read_bytes, total), total)
                if monotonic() > saved + SAVE_SECONDS:
                    save(False)
                    saved = monotonic()
            save(True)
        return state

    def _batches(self, state: PackingState, journal: "_Journal") -> Iterator[_Batch]:
        """Documents that are new, several at a time, and how far reading is after each batch."""
        now, is_dropped = state, False
        batch: _Batch | None = None
        for number, document in self._documents(state.file, state.place):
            kind, is_first = self._sources[number].kind, not (now.continues or is_dropped)
            key = 0
            if is_first:
                if not document.text:
                    continue
                key = int.from_bytes((document.key or sha256(document.text).digest())[:8])
                is_dropped = key in self._keys or journal.knows(key)
                now = replace(now, duplicates=now.duplicates + is_dropped)
            if is_dropped:
                is_dropped = not document.ends
                continue
            if is_first:
                self._keys.add(key)
                held_out = self._sources[number].held_out or key < self._held_out_below
                counted = "held_out_documents" if held_out else "documents"
                now = replace(now, held_out=held_out, **{counted: getattr(now, counted) + 1})
            if batch is not None and batch.kind != kind:
                yield batch
                batch = None
            batch = batch or _Batch(kind, not is_first, now)
            batch.keys += [key] if is_first else []
            batch.texts.append(replace(document, held_out=now.held_out))
            batch.size += len(document.text)
            now = replace(now, file=number, place=document.place, continues=not document.ends)
            batch.after = now
            if batch.size >= shards.BATCH_BYTES:
                yield batch
                batch = None
        # The last batch ends behind the last document, new or not.
        end = replace(now, file=len(self._sources), place=0)
        batch = batch or _Batch(TEXT, False, end)
        batch.after = end
        yield batch

    def _documents(self, file: int, place: int) -> Iterator[tuple[int, Document]]:
        """Documents from a place of a file on, with the numbers of their files."""
        options, before = self._options, sum(self._sizes[:file])
        take = options.chat.read if options.chat else None
        for number, source in enumerate(self._sources[file:], file):
            reading, files = ReadProgress(), [source.path]
            if source.kind == TOKENS:
                found = documents.read_tokens(files, options.tokenizer.separator, reading, place)
            elif source.kind in (JSONL, PARQUET, ARROW):
                read = documents.read_jsonl if source.kind == JSONL else documents.read_columns
                found = read(files, options.column, reading, place, take)
            elif options.separator:
                separator = options.separator.encode()
                found = documents.read_separated(files, separator, reading, place)
            else:
                found = documents.read_text(files, reading, place, has_tails=False)
            for document in found:
                self._read_bytes = before + reading.done
                yield number, document
            before, place = before + self._sizes[number], 0

    def _encode(self, batch: _Batch) -> tuple[bytes, bytes]:
        """The tokens of a batch, of training and of held-out text."""
        tokenizer = self._options.tokenizer
        if not batch.texts or batch.kind == TOKENS:
            tokens = [self._checked(document) for document in batch.texts]
        elif self._options.chat and isinstance(tokenizer, FileTokenizer):
            tokens = encode_chat(tokenizer, batch.texts, tokenizer.separator)
        else:
            tokens = shards.encode(tokenizer, batch.texts, not batch.continues)
        splits: tuple[list[bytes], list[bytes]] = ([], [])
        for document, made in zip(batch.texts, tokens, strict=True):
            splits[bool(document.held_out)].append(made.astype(self._type).tobytes())
        return b"".join(splits[0]), b"".join(splits[1])

    def _checked(self, document: Document) -> Any:
        """Tokens that were made before. Raises DataError if the tokenizer has no such token."""
        tokens = np.frombuffer(document.text, "<u4")
        end, tokenizer = self._options.tokenizer.separator, self._options.tokenizer
        if len(tokens) and int(tokens.max()) >= tokenizer.vocab:
            raise DataError(
                f"{document.file} holds token {tokens.max()}, and {tokenizer.file} has "
                f"{tokenizer.vocab}: name the tokenizer that it was made with by --tokenizer."
            )
        return np.append(tokens, np.uint32(end)) if document.ends and end is not None else tokens


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
        self._path = path
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
        self._fingerprint = fingerprint
        self.is_whole: bool = content.pop("whole", False)
        self.state = PackingState(**content)

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def knows(self, key: int) -> bool:
        """Whether a document of this key was packed."""
        with self._explained():
            found = self._database.execute("SELECT 1 FROM seen WHERE key = ?", (_signed(key),))
            return found.fetchone() is not None

    def save(self, state: PackingState, keys: Sequence[int], is_whole: bool) -> None:
        """Note how far packing is, and the keys of documents packed since."""
        content = {**asdict(state), "fingerprint": self._fingerprint, "whole": is_whole}
        with self._explained(), self._database:
            self._database.executemany(
                "INSERT OR IGNORE INTO seen VALUES (?)", ((_signed(key),) for key in keys)
            )
            self._database.execute(
                "INSERT OR REPLACE INTO state VALUES (0, ?)", (json.dumps(content),)
            )

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


def _signed(key: int) -> int:
    """A key as SQLite has integers."""
    return key - (1 << 63)
