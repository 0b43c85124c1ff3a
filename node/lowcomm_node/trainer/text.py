"""The text that a trainer trains on: which file, which tokenizer, and how far it is tokenized."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from lowcomm_node.data import Dataset, Tokenized, open_data, open_tokenizer
from lowcomm_node.data.tokenizer import Tokenizer, check_tokenizer, keep_tokenizer, use_threads
from lowcomm_node.errors import ConfigError
from lowcomm_node.node.messages import Tokenizing, TrainerSettings
from lowcomm_node.storage.files import DiskQuota
from lowcomm_protocol.spec.run import RunSpec

TELL_EVERY = 1.0
"""Seconds between two reports of progress."""


def open_text(
    spec: RunSpec,
    settings: TrainerSettings,
    disk_quota: DiskQuota,
    tell: Callable[[Tokenizing], None],
) -> Dataset:
    """Open the text and the tokenizer that a run asks for; ``tell`` is told the progress.

    Raises ConfigError if the owner must name one, or the tokenizer does not fit the run; DataError,
    DiskFull.
    """
    use_threads(settings.threads)
    tokenizer = _tokenizer_of(spec, settings)
    source = spec.data.source if spec.data.source != "local" else settings.data
    if source is None:
        raise ConfigError("This run trains on text of your own: name it with --data PATH.")
    progress = Telling(tell)
    return open_data(
        source, tokenizer, Path(settings.data_cache), settings.field, disk_quota, progress
    )


def _tokenizer_of(spec: RunSpec, settings: TrainerSettings) -> Tokenizer:
    name = spec.data.tokenizer if spec.data.tokenizer != "local" else settings.tokenizer
    if name is None:
        raise ConfigError("This run needs its tokenizer file: name it with --tokenizer PATH.")
    data = spec.data
    tokenizer = open_tokenizer(name, data.begin_tokens, data.end_token)
    check_tokenizer(tokenizer, data.tokenizer_sha256, spec.model.vocab, data.tokenizer_check)
    keep_tokenizer(tokenizer, Path(settings.checkpoints).parent)
    return tokenizer


class Telling:
    """Turns what is tokenized into events with a rate and the time that remains."""

    def __init__(
        self, tell: Callable[[Tokenizing], None], clock: Callable[[], float] = monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._began = self._told = clock()

    def __call__(self, tokenized: Tokenized) -> None:
        """Take in how far it is."""
        now = self._clock()
        if now < self._told + TELL_EVERY:
            return
        self._told = now
        rate = tokenized.done / (now - self._began)
        self._tell(
            Tokenizing(
                done=tokenized.done,
                total=tokenized.total,
                tokens=tokenized.tokens,
                rate=rate,
                remaining=(tokenized.total - tokenized.done) / rate if rate else None,
            )
        )
