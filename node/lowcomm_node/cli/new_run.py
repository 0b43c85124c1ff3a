"""Checks of a new run for `init` and `create`, and messages for its creator."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lowcomm_node.data.tokenizer import (
    KEPT,
    FileTokenizer,
    check_of,
    check_tokenizer,
    open_tokenizer,
)
from lowcomm_node.errors import ConfigError
from lowcomm_node.planner.run_template import OpenWeights, TokenizerFile
from lowcomm_node.system.units import write_size
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.names import MAX_GROUP
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import (
    BUILTIN_TOKENS,
    PIECE_BYTES,
    RARELY,
    ModelSettings,
    StartSettings,
    digest_of_pieces,
)

SPARE_VOCABULARY = 10
"""One in as many tokens of a model may be spare, as vocabularies are rounded up."""


def check_size(spec: RunSpec) -> str | None:
    """A warning about how many peers a run is for. Raises ConfigError if it begins with too
    many."""
    group, begins_with = spec.sync.group, spec.run.start_peers
    if spec.sync.realigns_among(begins_with):
        raise ConfigError(
            f"start_peers = {begins_with}, but group = {group} and consensus = 0: most exchanges "
            f"of more than {group} peers would be realignments in fp32. Set start_peers = {group} "
            f"or less{_larger_group(group)}, slice_rounds = {RARELY}, "
            'codec = "bf16" and consensus = 1.0, or method = "lowcomm".'
        )
    if not spec.sync.realigns_among(group + 1):
        return None
    return (
        f"this run is for at most {group} peers: with more, most exchanges are realignments in "
        f"fp32, for consensus = 0. For a larger swarm set slice_rounds = {RARELY}"
        f'{_larger_group(group)}, codec = "bf16" and consensus = 1.0, or method = "lowcomm".'
    )


def _larger_group(group: int) -> str:
    return f", group up to {MAX_GROUP}" if group < MAX_GROUP else ""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Choices of a plan for a run."""

    method: str
    optimizer: str
    settings: Mapping[str, Any]
    """Settings of ``[sync]`` that differ from the preset."""
    section: Mapping[str, Any]
    """``[plan]`` of the run.toml."""
    reason: str


def planned(
    spec: RunSpec, options: Mapping[str, Any], method: str | None, optimizer: str | None
) -> Planned:
    """The best method for the line of ``options``, or the best interval of ``method``.

    Raises ConfigError.
    """
    from lowcomm_node.planner.plan import OPTIMIZER, plan  # loads torch
    from lowcomm_node.planner.question import question_of

    train = spec.train.model_copy(update={"optimizer": optimizer or OPTIMIZER})
    question = question_of(spec.model_copy(update={"train": train}), options, asked="--plan")
    told = plan(question, from_file=True)
    best = next((one for one in told.choices if method in (None, one.method)), None)
    if best is None:
        raise ConfigError(
            f"--method {method} can't be planned for {question.peers} peers: it does not exchange, "
            "is for fewer, or has the settings of a paper; leave --method away to get the best."
        )
    reason = f"{best.method}: every {best.interval:.0f} steps is the shortest interval that this "
    return Planned(
        method=best.method,
        optimizer=best.optimizer,
        settings=best.settings,
        section=question.section(),
        reason=told.reason if best is told.best else f"{reason}line carries",
    )


def check_line(spec: RunSpec, text: str, source: str) -> str | None:
    """A warning where the line that a run.toml declares does not carry the interval that is written
    in it. Raises ConfigError."""
    section = tomllib.loads(text).get("plan")
    if section is None or spec.sync.group == 1:
        return None
    from lowcomm_node.planner.plan import as_written  # loads torch
    from lowcomm_node.planner.question import question_of
    from lowcomm_node.planner.words import interval_in_words

    why = interval_in_words(as_written(question_of(spec, {}, section, source, asked="")))
    remedy = "plan it again with `lowcomm-node plan`, or remove [plan] if the line is another"
    return f"{why}: {remedy}" if why else None


def name_tokenizer(spec: RunSpec, path: str | None) -> RunSpec:
    """Put its creator's tokenizer into a specification: SHA-256, and a check of its tokens.

    Raises ConfigError.
    """
    if spec.data.tokenizer != "local":
        return spec
    if path is None:
        if not spec.data.tokenizer_size:
            raise ConfigError(
                'data.tokenizer = "local", but nobody knows which file, or how large it is: name '
                "yours with --tokenizer PATH, so that the run carries its SHA-256 and size, and "
                "refuses others."
            )
        return spec
    found = open_tokenizer_file(path)
    data = spec.data
    check_tokenizer(found, data.tokenizer_sha256, spec.model.vocab, data.tokenizer_check)
    file = tokenizer_file(path)
    named: dict[str, object] = {
        "tokenizer_sha256": file.sha256,
        "tokenizer_size": file.size,
        "tokenizer_pieces": file.pieces,
        "tokenizer_check": file.check,
    }
    if not data.tokenizer_sha256 and not {"begin_tokens", "end_token"} & data.model_fields_set:
        named |= {"begin_tokens": file.begin_tokens, "end_token": file.end_token}
    data = data.model_copy(update=named)
    return spec.model_copy(update={"data": data})


def tokens_of(spec: RunSpec, path: str | None) -> int | None:
    """Tokens of the tokenizer of a run; None if its file is not here."""
    known = BUILTIN_TOKENS.get(spec.data.tokenizer)
    return known or (open_tokenizer_file(path).vocab if path else None)


def check_used(spec: RunSpec, tokens: int | None) -> str | None:
    """A warning where many weights are of words that the tokenizer does not have."""
    vocab = spec.model.vocab
    if tokens is None or spec.start.files or vocab - tokens <= vocab // SPARE_VOCABULARY:
        return None
    used = parameters_of(spec.model.model_copy(update={"vocab": tokens}))
    return (
        f"model.vocab = {vocab}, but the tokenizer has {tokens} tokens: "
        f"{1 - used / parameters_of(spec.model):.0%} of the weights are of words that never occur. "
        f"Set vocab = {tokens}, or name a larger tokenizer."
    )


def epochs_in_words(spec: RunSpec) -> str | None:
    """Epochs of a built-in text that a peer trains on; None below two."""
    if spec.data.source == "local" or spec.data.tokenizer == "local":
        return None
    from lowcomm_node.data.corpus import open_corpus

    corpus, tokenizer = open_corpus(spec.data.source), open_tokenizer(spec.data.tokenizer)
    sample = [document.text for document in islice(corpus.documents(), 100)]
    tokens_a_byte = sum(map(len, tokenizer.encode_all(sample))) / sum(map(len, sample))
    text = tokens_a_byte * corpus.size
    epochs = spec.run.steps * spec.tokens_per_step / text
    if epochs < 2:
        return None
    return (
        f"each peer trains on {spec.run.steps * spec.tokens_per_step / 1e6:,.0f} million tokens, "
        f"{epochs:,.0f} epochs of the {text / 1e6:,.1f} million of {spec.data.source}: a smaller "
        'model, fewer steps, or more text with source = "local" learns more from that time'
    )


def name_layout(spec: RunSpec) -> RunSpec:
    """Put the layout of a model of another library, and that library's release, into a
    specification. Raises ConfigError."""
    if not isinstance(spec.model, TransformersSettings):
        return spec
    from lowcomm_node.models.transformers import checked_model, layout_of, library

    layout = layout_of(checked_model(spec.model))
    told = {"layout": layout, "release": spec.model.release or library().__version__}
    return spec.model_copy(update={"model": spec.model.model_copy(update=told)})


def open_tokenizer_file(path: str) -> FileTokenizer:
    """The tokenizer of a file that a run can name by its SHA-256. Raises ConfigError."""
    found = open_tokenizer(path)
    if not isinstance(found, FileTokenizer):
        raise ConfigError(
            "--tokenizer bytes needs no file: leave it away, runs use bytes unless they say "
            "otherwise."
        )
    return found


def tokenizer_file(
    path: str, weights: OpenWeights | None = None, folder: Path | None = None
) -> TokenizerFile:
    """Describe a tokenizer's file for a run, and the folder of weights that it belongs to.

    Raises ConfigError.
    """
    found = open_tokenizer_file(path)
    digests = [
        sha256(found.content[start : start + PIECE_BYTES]).digest()
        for start in range(0, len(found.content), PIECE_BYTES)
    ]
    from lowcomm_node.models.conventions import conventions_of  # loads torch

    vocab, positions = (weights.model.vocab, weights.longest) if weights else (found.vocab, 0)
    read = conventions_of(folder or found.path.parent, found, vocab, positions)
    return TokenizerFile(
        vocab=found.vocab,
        sha256=found.sha256,
        size=len(found.content),
        pieces=digest_of_pieces(digests),
        check=check_of(found),
        begin_tokens=read.begin_tokens,
        end_token=read.end_token,
        export=read.export,
        warnings=read.warnings,
    )


def open_weights(folder: Path) -> OpenWeights:
    """Describe the weights in a folder of Hugging Face's for a run. Raises ConfigError."""
    from lowcomm_node.models.open_weights import check_weights, files_of, settings_of
    from lowcomm_node.storage.file_digests import pin

    read = settings_of(folder)
    files = files_of(folder)
    check_weights(read.settings, files)
    try:
        start = StartSettings(files=tuple(pin(file) for file in files))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{folder}: {first['input']!r}: {expected_in_words(first)}: rename the file, and its "
            "entry in the index."
        ) from None
    warnings = [read.note] if read.note else []
    if read.left_out:
        warnings.append(
            f"{folder}: left out {', '.join(read.left_out)}, which transformers does not read"
        )
    return OpenWeights(read.settings, read.longest, start, tuple(warnings))


def tokenizer_beside(folder: Path) -> Path:
    """The tokenizer of a folder with weights. Raises ConfigError if there is none."""
    path = folder / KEPT
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing, and only tokenizers of this form are read: name one with "
            "--tokenizer."
        )
    return path


def parameters_of(model: ModelSettings) -> int:
    """Parameters of a model, for ``fragments = "auto"``."""
    from lowcomm_node.trainer.memory import count_parameters  # loads torch

    return count_parameters(model)


def how_to_join(spec: RunSpec, address: str) -> str:
    """The command by which others join a run, and what else they need."""
    data = " --data PATH" if spec.data.source == "local" else ""
    unpinned = spec.data.tokenizer == "local" and not spec.data.tokenizer_sha256
    tokenizer = " --tokenizer PATH" if unpinned else ""
    needs = {
        "invite": " --invite ...\nwhich you make with\n  lowcomm-node invite",
        "list": "\nas one of its members",
    }.get(spec.run.admission, "")
    told = f"lowcomm-node join --peers {address}{data}{tokenizer}{needs}"
    if spec.start.files:
        size = write_size(spec.start.size)
        told += (
            f"\nand the first node with\n  --weights DIR\nwhich sends the others {size} of weights"
        )
    return told


def keeping_in_words(kept: Mapping[str, Keeping]) -> str:
    """Number of servers that keep a run, for how long, and the remedy if none does."""
    keepers = [keeping for keeping in kept.values() if keeping.kept]
    refused = {peer: keeping.reason for peer, keeping in kept.items() if not keeping.kept}
    lines = [f"{peer[-6:]} does not keep it: {reason}" for peer, reason in refused.items()]
    seconds = [keeping.seconds for keeping in keepers if keeping.seconds is not None]
    if keepers:
        lasts = (
            f"for {_duration(min(seconds))} without a peer that answers, and for as long as one "
            "does"
            if seconds
            else "for good"
        )
        servers = "server" if len(kept) == 1 else "servers"
        lines.insert(0, f"kept by {len(keepers)} of {len(kept)} {servers}, {lasts}")
    else:
        lines += [
            "no server keeps it: it stays in the DHT for up to half an hour, and for as long as a "
            "node trains it. Start one soon, name another server with --peers, or ask the operator "
            "of this one to serve it with --run"
        ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds / 3600))} h"
