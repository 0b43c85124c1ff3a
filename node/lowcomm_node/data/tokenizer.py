"""Text to tokens and back."""

import hashlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.errors import ConfigError

_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """What the data and the ``generate`` command need of a tokenizer."""

    @property
    def name(self) -> str:
        """Tells tokenizers apart: equal names give equal tokens."""
        ...

    @property
    def vocab(self) -> int:
        """Tokens are below this number."""
        ...

    @property
    def separator(self) -> int | None:
        """The token after each document."""
        ...

    def encode(self, text: bytes) -> NDArray[Any]:
        """Tokens of a text, one-dimensional, of any unsigned integer type."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; U+FFFD for bytes that are not UTF-8."""
        ...


class BytesTokenizer:
    """Each byte is a token, and zero, which text does not hold, ends a document."""

    name = "bytes"
    vocab = 256
    separator = 0

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may know more tokens than there are bytes; 255 never is text.
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json of Hugging Face's ``tokenizers``, from a path that this machine's owner names."""

    def __init__(self, path: Path) -> None:
        library = _tokenizers(path)
        try:
            content = path.read_bytes()
            self._tokenizer = library.Tokenizer.from_str(content.decode())
            # Numbers may have gaps, so their count is not always enough.
            self.vocab: int = max(self._tokenizer.get_vocab().values()) + 1
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} is not a tokenizer.json ({error}): name one with --tokenizer.") from error
        # Files of models for short texts ask to cut each text off, and to fill it up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"tokenizers:{hashlib.sha256(content).hexdigest()[:16]}"
        known = (self._tokenizer.token_to_id(token) for token in _SEPARATORS)
        self.separator: int | None = next((token for token in known if token is not None), None)

    def encode(self, text: bytes) -> NDArray[Any]:
        encoding = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))


def open_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the path of a tokenizer.json. Raises ConfigError if it can't be opened."""
    if name == "bytes":
        return BytesTokenizer()
    if name == "local":
        raise ConfigError("This run leaves the tokenizer to each owner: name a tokenizer.json with --tokenizer PATH.")
    path = Path(os.path.expanduser(name))  # noqa: PTH111, Path's own raises RuntimeError on a user it does not know
    if not path.is_file():
        raise ConfigError(
            f"tokenizer = {name!r} is neither 'bytes' nor a file: name a tokenizer.json with --tokenizer."
        )
    return FileTokenizer(path)


def _tokenizers(path: Path) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError(
            f"{path} needs the library tokenizers: pip install 'lowcomm-node[hf]', or use 'bytes'."
        ) from None
