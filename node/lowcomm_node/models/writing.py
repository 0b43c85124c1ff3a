"""A model that writes: it continues a text, or answers the messages of a conversation.

A conversation is a list of texts, the owner's and the model's in turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lowcomm_node.data import Tokenizer
from lowcomm_node.data.chat import render_apart, words_of
from lowcomm_node.data.tokenizer import FileTokenizer, check_vocabulary, prompt_of
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Model
from lowcomm_node.models.conventions import conventions_of
from lowcomm_node.models.inference import (
    TOP_K,
    generate,
    load_checkpoint,
    load_model,
    load_start,
    tokenizer_of,
)
from lowcomm_node.storage.files import kept_run
from lowcomm_protocol.spec.sections import ExportSettings

MOST_TURNS = 64
"""Messages of the owner that the model reads, if its context is not full before."""
_ROLES = ("user", "assistant")
_ANSWER = "answer-0b1n"
"""A text that a template does not hold: what follows it ends an answer."""


@dataclass(frozen=True)
class Writer:
    """A model, and what its run says about texts."""

    model: Model
    tokenizer: Tokenizer
    export: ExportSettings

    def text(
        self, asked: str | Sequence[str], tokens: int, temperature: float, seed: int = 0
    ) -> str:
        """Continue a text by ``tokens`` tokens, or answer a conversation in at most as many.

        Raises ConfigError.
        """
        return self.tokenizer.decode(list(self._draw(asked, tokens, temperature, seed)))

    def stream(
        self, asked: str | Sequence[str], tokens: int, temperature: float, seed: int = 0
    ) -> Iterator[str]:
        """Write the same, piece by piece. Raises ConfigError at once."""
        return self._pieces(self._draw(asked, tokens, temperature, seed))

    def _pieces(self, drawn: Iterable[int]) -> Iterator[str]:
        known, text, shown = list[int](), "", 0
        for token in drawn:
            known.append(token)
            text = self.tokenizer.decode(known)
            if not text.endswith("\ufffd"):  # the next token may complete a character
                yield text[shown:]
                shown = len(text)
        yield text[shown:]

    def _draw(
        self, asked: str | Sequence[str], tokens: int, temperature: float, seed: int
    ) -> Iterator[int]:
        ends = frozenset[int]()
        if isinstance(asked, str):
            start = prompt_of(self.tokenizer, asked)
        else:
            start, ends = self._read(asked, tokens)
        drawn = generate(self.model, start, tokens, temperature, TOP_K, seed)
        return takewhile(lambda token: token not in ends, drawn)

    def _read(self, texts: Sequence[str], tokens: int) -> tuple[list[int], frozenset[int]]:
        """What the model reads of a conversation, the newest messages that leave room for
        ``tokens``, and the tokens that end its answer."""
        export, encoder, context = self.export, self.tokenizer, self.model.settings.context
        if not export.chat_template and isinstance(encoder, FileTokenizer):
            folder = Path(encoder.file).parent
            export = conventions_of(folder, encoder, self.model.settings.vocab).export
        if not export.chat_template:
            raise ConfigError(
                "Neither the run nor its tokenizer has a chat template: put a chat_template.jinja "
                "beside the tokenizer.json and name that with --tokenizer, or leave --chat away."
            )
        messages = [
            {"role": _ROLES[place % 2], "content": text} for place, text in enumerate(texts)
        ]
        shorter = [(messages[first:], True) for first in range(0, len(texts), 2)][-MOST_TURNS:]
        example = [{"role": role, "content": _ANSWER} for role in _ROLES]
        whole, *prompts = render_apart(
            export.chat_template, words_of(encoder, export), [(example, False), *shorter]
        )
        room = context - min(tokens, context // 2)
        reads = [encoder.encode(prompt.encode()).tolist() for prompt in prompts]
        start = next((read for read in reads if len(read) <= room), reads[-1])
        if len(start) >= context:
            raise ConfigError(
                f"The message takes {len(start)} tokens, and this model reads {context} with its "
                "answer: shorten it."
            )
        ends = export.eos_token_id or (() if encoder.separator is None else (encoder.separator,))
        return start, frozenset((*ends, *self._turn_end(whole.rpartition(_ANSWER)[2])))

    def _turn_end(self, after: str) -> list[int]:
        """The special token that begins what a template writes after an answer, if it is one."""
        token = next(iter(self.tokenizer.encode(after.encode()).tolist()), None)
        if token is None or not isinstance(self.tokenizer, FileTokenizer):
            return []
        spelled = self.tokenizer.token_of(token)
        is_special = spelled and after.startswith(spelled) and not self.tokenizer.decode([token])
        return [token] if is_special else []


def open_writer(path: Path, tokenizer: str | None = None, *, at_start: bool = False) -> Writer:
    """The writer of a checkpoint, or one ``at_start``: with the weights that its run began with.

    ``tokenizer``: its file, where the home keeps no copy. Raises CheckpointError, ConfigError.
    """
    checkpoint = load_checkpoint(path)
    encoder, of_run = tokenizer_of(checkpoint, tokenizer), checkpoint.info.path.parent.parent
    model = load_start(of_run) if at_start else load_model(checkpoint)
    check_vocabulary(encoder, model.settings.vocab)
    run = kept_run(of_run / "run.json")
    return Writer(model, encoder, run.spec.export if run else ExportSettings())
