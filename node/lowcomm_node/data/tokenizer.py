"""Text to tokens and back."""

import hashlib
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.sources import expanded
from lowcomm_node.data.stories import NAME as STORIES
from lowcomm_node.data.stories import PIECES, words
from lowcomm_node.data.trial import CHECKED
from lowcomm_node.errors import ConfigError
from lowcomm_node.storage.files import sha256_file, write_atomic
from lowcomm_node.system.command import load_optional
from lowcomm_protocol.spec.sections import BYTES, MAX_TOKENIZER_BYTES, STORY_TOKENS

KEPT = "tokenizer.json"  # name of the copy in the folder of a run
TRIAL_SECONDS = 600.0  # for the process that tries a file, which also has limits of its own
_TRIED = set[bytes]()  # SHA-256 of files that have passed
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(ABC):
    """A way to make tokens of text, and text of tokens."""

    name: str
    """Identifies the tokenizer: equal names give equal tokens."""
    vocab: int
    """Exclusive upper bound of the tokens."""
    begins: tuple[int, ...] = ()
    """The tokens before each document and each prompt."""
    separator: int | None
    """The token after each document."""
    file: str
    """Its file, or its name, for messages."""
    sha256: str = ""
    """SHA-256 of its file, 64 hexadecimal digits; empty if it has none."""
    marks: Mapping[str, Any] = {}
    """Tokens around documents, for checkpoints, where they differ from the file's."""

    def encode(self, text: bytes) -> NDArray[Any]:
        """Tokens of a text, one-dimensional, of any unsigned integer type."""
        return self.encode_all([text])[0]

    @abstractmethod
    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Tokens of several texts, on all cores that this process may use."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; U+FFFD for bytes that are not UTF-8."""


class BytesTokenizer(Tokenizer):
    """Each byte is a token, and zero, which text does not hold, ends a document."""

    name = file = "bytes"
    vocab = 256
    separator = 0

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may know more tokens than there are bytes; 255 never is text.
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


class StoryTokenizer(Tokenizer):
    """Words of the tiny stories with the blank before them, and bytes (below 256) for all else."""

    name = file = STORIES
    vocab = STORY_TOKENS
    separator = ord("\n")  # an empty line follows a story

    def __init__(self) -> None:
        self._tokens = {word: BYTES + number for number, word in enumerate(words())}
        self._bytes = [bytes([byte]) for byte in range(BYTES)] + [word.encode() for word in words()]
        self.sha256 = hashlib.sha256("\n".join(words()).encode()).hexdigest()

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        # Latin-1 has a character for each byte, so nothing is lost where a text is no UTF-8.
        return [
            np.fromiter(self._numbers(text.decode("latin-1")), dtype=np.uint16) for text in texts
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may know more tokens than there are; 255 never is text.
        known = (token if token < len(self._bytes) else 255 for token in tokens)
        return b"".join(self._bytes[token] for token in known).decode(errors="replace")

    def _numbers(self, text: str) -> Iterator[int]:
        for piece in re.findall(PIECES, text):
            number = self._tokens.get(piece)
            yield from (number,) if number is not None else piece.encode("latin-1")


class FileTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's ``tokenizers``."""

    def __init__(self, path: Path, begins: Sequence[int] = (), end: int | None = None) -> None:
        """Open it; ``begins``, ``end``: the tokens around each document. Raises ConfigError."""
        library = load_optional("tokenizers", str(path), "hf")
        self.file = str(path)
        self.content = content = _read_tried(path)
        with self._explained("is not a tokenizer.json"):
            self._tokenizer = library.Tokenizer.from_str(content.decode())
            # Numbers may have gaps, so their count is not always enough.
            self.vocab = max(self._tokenizer.get_vocab().values()) + 1
            # Files of models for short texts enable truncation and padding.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.name = f"tokenizers:{self.sha256[:16]}"
        self.begins = tuple(begins)
        self.number_of: Callable[[str], int | None] = self._tokenizer.token_to_id
        """The number of a token; None if there is none of this text."""
        self.token_of: Callable[[int], str | None] = self._tokenizer.id_to_token
        """The text of a token, also of a special one; None if there is none of this number."""
        numbers = map(self.number_of, _SEPARATORS)
        self.separator = next((number for number in numbers if number is not None), None)
        if self.begins or end not in (None, self.separator):
            self.separator = self.separator if end is None else end
            self.marks = {"begin_tokens": [*self.begins], "end_token": self.separator}
            self.name += f":{self.begins}{self.separator}"
            self.vocab = max(self.vocab, *(token + 1 for token in (*self.begins, end or 0)))

    @property
    def template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the file's template puts before and after a text."""
        with self._explained("can't tokenize a text"):
            encoding = self._tokenizer.encode("a")
        added = "".join(str(one) for one in encoding.special_tokens_mask)
        before = len(added) - len(added.lstrip("1"))
        after = len(added[before:]) - len(added[before:].rstrip("1"))
        return tuple(encoding.ids[:before]), tuple(encoding.ids[len(added) - after :])

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        # The library uses threads of its own (RAYON_NUM_THREADS) and releases the interpreter lock.
        decoded = [text.decode(errors="replace") for text in texts]
        with self._explained("can't tokenize a text"):
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Tokens of texts, and the character of its text at which each begins."""
        with self._explained("can't tokenize a text"):
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (np.asarray(one.ids, np.uint32), np.asarray([place for place, _ in one.offsets], int))
            for one in encodings
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        with self._explained("can't turn tokens into text"):
            return self._tokenizer.decode(list(tokens))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Raise ConfigError in place of whatever the library raises."""
        try:
            yield
        except BaseException as error:
            # It raises plain Exception, and where Rust panics something that is none.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                shown = str(error)[:200]
                raise ConfigError(
                    f"{self.file} {what} ({shown}): name another file with --tokenizer."
                ) from None
            raise


def open_tokenizer(name: str, begins: Sequence[int] = (), end: int | None = None) -> Tokenizer:
    """``bytes``, ``builtin:stories``, or the path of a tokenizer.json; ``begins``, ``end``: the
    tokens around each document, if not those of older runs. Raises ConfigError."""
    if name in (BytesTokenizer.name, STORIES):
        return BytesTokenizer() if name == BytesTokenizer.name else StoryTokenizer()
    path = expanded(name)
    if not path.is_file():
        raise ConfigError(
            f"tokenizer = {name!r} is neither 'bytes' nor a file: name a tokenizer.json with "
            "--tokenizer."
        )
    return FileTokenizer(path, begins, end)


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that a model continues a text from; never none."""
    tokens = tokenizer.encode((text or ("" if tokenizer.begins else "\n")).encode())
    return [*tokenizer.begins, *(int(token) for token in tokens)]


def check_of(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokens of `CHECKED`, as little-endian integers of 32 bits."""
    return hashlib.sha256(tokenizer.encode(CHECKED.encode()).astype("<u4").tobytes()).hexdigest()


def check_tokenizer(tokenizer: Tokenizer, wanted: str, vocab: int, tokens: str = "") -> None:
    """Raise ConfigError if a tokenizer is not the one of a run: of SHA-256 ``wanted``, for a model
    of ``vocab`` tokens, where ``check_of`` gives ``tokens`` (empty: nobody knows)."""
    if wanted and tokenizer.sha256 != wanted:
        raise ConfigError(
            f"{tokenizer.file} is not the tokenizer of this run: its SHA-256 is "
            f"{tokenizer.sha256 or 'none'}, the run's is {wanted}. Name the file that the run's "
            "creator used with --tokenizer."
        )
    if tokens and check_of(tokenizer) != tokens:
        raise ConfigError(
            f"{tokenizer.file} makes other tokens here than at the run's creator: this "
            "release of the library tokenizers reads it in another way. Install the one that "
            "lowcomm was tested with: pip install --force-reinstall 'lowcomm-node[hf]'."
        )
    check_vocabulary(tokenizer, vocab)


def check_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise ConfigError if a model of ``vocab`` tokens has no room for all of a tokenizer's."""
    if tokenizer.vocab > vocab:
        raise ConfigError(
            f"model.vocab = {vocab} is too small for the tokenizer {tokenizer.file}, which "
            f"has {tokenizer.vocab} tokens: name the run's own tokenizer, or have its creator "
            f"publish a run with vocab = {tokenizer.vocab}."
        )


def identify(tokenizer: Tokenizer) -> dict[str, Any]:
    """A checkpoint's entry for its tokenizer: name, SHA-256, and the tokens around documents."""
    return {"file": Path(tokenizer.file).name, "sha256": tokenizer.sha256, **tokenizer.marks}


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy a tokenizer's file beside the checkpoints of its run, so that they stay usable."""
    path = folder / KEPT
    if isinstance(tokenizer, FileTokenizer) and not (
        path.is_file() and sha256_file(path) == tokenizer.sha256
    ):
        write_atomic(path, tokenizer.content)


def use_threads(count: int | None) -> None:
    """Set the threads of tokenizers (None: one per core). Call it before the first one works."""
    # Set explicitly, or the library disables its threads after a fork, with a warning.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if count is not None:
        os.environ["RAYON_NUM_THREADS"] = str(count)


def _read_tried(path: Path) -> bytes:
    """Read a file, perhaps a stranger's, and try it in a process of its own. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): see its rights.") from None
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ConfigError(
            f"{path} has more than {MAX_TOKENIZER_BYTES:,} bytes, too many for a tokenizer.json: "
            "name one with --tokenizer."
        )
    if (digest := hashlib.sha256(content).digest()) in _TRIED:
        return content
    alone = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    try:
        tried = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("trial.py"))],
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | alone,
            timeout=TRIAL_SECONDS,
            check=False,
        )
        problem = "takes too much memory or time" if tried.returncode else tried.stdout.decode()
    except subprocess.TimeoutExpired:
        problem = f"can't be read within {TRIAL_SECONDS:.0f} s"
    except OSError as error:
        problem = f"can't be tried in a process of its own ({error.strerror})"
    if problem.strip():
        raise ConfigError(f"{path} {problem.strip()}: name another file with --tokenizer.")
    _TRIED.add(digest)
    return content
