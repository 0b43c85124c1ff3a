"""``data``: pack text once for a run, check packs, look into them, give them away."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowcomm_node.cli.common import Here, app, command, read_settings, setting_options
from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import unwinding_signals
from lowcomm_node.system.units import clean, read_size, write_size
from lowcomm_protocol.spec.sections import DIGEST_BYTES, MAX_LICENCE, PIECE_BYTES, SMALLEST_PIECE

if TYPE_CHECKING:
    from lowcomm_node.data.chat import ChatTemplate
    from lowcomm_node.data.pack import Pack, Show
    from lowcomm_node.data.tokenizer import Tokenizer

data = typer.Typer(help="Packed text of a run: pack, verify, show, serve.", no_args_is_help=True)
app.add_typer(data, name="data")
SAMPLE_TOKENS = 80
SERVING = (
    *("home", "peers", "run", "invite", "name", "tokenizer", "max_up", "max_down", "max_peers"),
    *("max_disk", "max_data", "mirror", "allow_mirrors", "host", "port", "dht_port", "announce"),
    *("metrics", "control_port"),
)
"""Settings of a node that matters where it gives text away."""


@command(of=data)
def pack(
    here: Here,
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    tokenizer: str = "bytes",
    field: str | None = None,
    separator: str = "",
    chat: Annotated[bool, typer.Option("--chat")] = False,
    piece: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    licence: str = "",
    words: str = "",
) -> None:
    """Turn text into one file that a run pins and its peers send one another.

    Interrupted, it goes on by the same command.

    Example: lowcomm-node data pack texts/ wiki.pack

    Args:
        sources: Files, folders or globs of .txt, .jsonl (.gz, .zst), .parquet, .arrow or .bin, or
            folders of datasets.
        out: Where to write the pack; two small files are put beside it.
        tokenizer: bytes, builtin:stories, or a tokenizer.json.
        field: Field or column that holds the text; default: text, with --chat messages.
        separator: Text between the documents of a text file; default: each file is a document.
        chat: Read conversations, by the tokenizer's chat template; answers alone are learned.
        piece: Bytes of a piece, such as 64KiB; default: by the size of the text.
        licence: Licence of the text.
        words: Words to people who look into the pack.
    """
    from lowcomm_node.data.corpus import find_text
    from lowcomm_node.data.documents import ReadOptions
    from lowcomm_node.data.pack import ENDING
    from lowcomm_node.data.packing import Packer
    from lowcomm_node.data.tokenizer import use_threads
    from lowcomm_node.storage.files import load_or_create_identity

    here.log()
    use_threads(None)
    piece_bytes = _piece_bytes(piece) if piece else None
    encoder, template = _tokenizer_of(tokenizer, chat)
    path = out if out.suffix == ENDING else out.with_name(out.name + ENDING)
    column = field or ("messages" if chat else "text")
    text = find_text(sources, ReadOptions(column, separator, encoder.separator, template))
    maker = load_or_create_identity(here.settings().paths.identity)
    packer = Packer(text, path, encoder, maker, is_masked=chat)
    with _progress(here) as show, unwinding_signals():
        made = packer.pack({"licence": licence, "words": words}, show, piece_bytes)
    option = "" if made.description.tokenizer.name != "local" else f" --tokenizer {tokenizer}"
    here.show(
        _facts(made),
        f"{_in_words(made)}\nput it into a run with\n  lowcomm-node init --data {path}{option}",
    )


@command(of=data, home=False)
def verify(here: Here, packs: Annotated[list[Path], typer.Argument(metavar="PACK...")]) -> None:
    """Read every piece of packs, and name the first that is not as it was packed.

    Example: lowcomm-node data verify wiki.pack

    Args:
        packs: Packs, or folders of them.
    """
    from lowcomm_node.data.pack import find_packs

    found = find_packs(*packs)
    for pack in found:
        with _progress(here) as show:
            piece = pack.first_wrong_piece(show(pack.path.name))
        if piece is not None:
            start = piece * pack.text.piece_bytes
            raise DataError(
                f"{pack.path}: piece {piece} (bytes {start:,} to "
                f"{start + pack.text.piece_bytes:,}) is not as its maker packed it: copy the file "
                "again, or have peers send it."
            )
    here.show(
        list(map(_facts, found)),
        "\n".join(f"{pack.path}: all {pack.text.piece_count} pieces" for pack in found),
    )


@command(of=data, home=False)
def show(
    here: Here,
    packs: Annotated[list[Path], typer.Argument(metavar="PACK...")],
    tokenizer: str | None = None,
    piece: int = 0,
) -> None:
    """Say what is in packs, with a sample in words.

    Example: lowcomm-node data show wiki.pack

    Args:
        packs: Packs, or folders of them.
        tokenizer: The tokenizer.json of the pack, for a sample.
        piece: Piece from which the sample comes.
    """
    from lowcomm_node.data.pack import find_packs

    samples = [(pack, _sample(pack, tokenizer, piece)) for pack in find_packs(*packs)]
    here.show(
        [{**_facts(pack), "sample": text} for pack, text in samples],
        "\n\n".join(f"{_in_words(pack)}\n{text}" for pack, text in samples),
    )


@command(of=data, home=False, groups={"flags": setting_options(SERVING)})
def serve(
    here: Here,
    flags: dict[str, Any],
    packs: Annotated[Path | None, typer.Argument(metavar="[PACK]")] = None,
) -> None:
    """Give packed text to the peers of a run, without training: needs no GPU, loads no PyTorch.

    Pieces that this machine lacks are fetched first. Ctrl-C ends it.

    Example: lowcomm-node data serve wiki.pack --peers ADDRESS

    Args:
        packs: A pack, or a folder of packs; without: the text comes from peers.
    """
    from lowcomm_node.cli.join import live

    live(here, read_settings(flags | {"data": packs and str(packs)}), trains=False)


def pin_packs(paths: Sequence[Path], pinned: Mapping[str, Any] | None) -> tuple[Any, int]:
    """``[data]`` of a run that trains on packs, and the vocabulary of their one tokenizer.

    Shares are as their tokens. ``pinned``: ``[data]`` of the owner's tokenizer.json. Raises
    ConfigError, DataError.
    """
    from lowcomm_node.data.pack import find_packs
    from lowcomm_protocol.spec.sections import BUILTIN_TOKENS, MAX_PARTS

    packs = find_packs(*paths)
    tokenizer = packs[0].description.tokenizer
    if other := [found for found in packs if found.description.tokenizer != tokenizer]:
        raise ConfigError(
            f"{other[0].path} and {packs[0].path} have different tokenizers: pack both with one."
        )
    if len(packs) > MAX_PARTS:
        raise ConfigError(f"{len(packs)} packs are more than {MAX_PARTS}: pack several as one.")
    if tokenizer.sha256 != (pinned or {}).get("tokenizer_sha256", ""):
        raise ConfigError(
            f"{packs[0].path} needs "
            + (
                f"--tokenizer with the file of SHA-256 {tokenizer.sha256}"
                if tokenizer.sha256
                else f"no --tokenizer, its own is {tokenizer.name}: leave that away"
            )
            + "."
        )
    total = sum(found.text.tokens for found in packs)
    parts = [
        found.text.model_dump(exclude={"mirrors"})
        | {"share": round(found.text.tokens / total, 4) or 0.0001}
        for found in packs
    ]
    section = {**(pinned or {}), "source": "packed", "tokenizer": tokenizer.name, "parts": parts}
    if tokenizer.sha256:
        section |= {"begin_tokens": tokenizer.begin_tokens, "end_token": tokenizer.end_token}
    return section, BUILTIN_TOKENS.get(tokenizer.name, tokenizer.vocab)


def licences_of_packs(paths: Sequence[Path]) -> list[str]:
    """The licences that packs name, for the card of a model."""
    from lowcomm_node.data.pack import find_packs

    found = {clean(one.description.licence): one.path.name for one in find_packs(*paths)}
    return [f"{licence} ({name})"[:MAX_LICENCE] for licence, name in found.items() if licence]


def _tokenizer_of(name: str, chat: bool) -> "tuple[Tokenizer, ChatTemplate | None]":
    """The tokenizer of a pack, with the tokens around documents that its folder names, and its
    chat template. Raises ConfigError."""
    from lowcomm_node.data.chat import ChatTemplate, words_of
    from lowcomm_node.data.tokenizer import FileTokenizer, open_tokenizer

    tokenizer = open_tokenizer(name)
    if not isinstance(tokenizer, FileTokenizer):
        if chat:
            raise ConfigError("--chat needs a tokenizer.json: name one with --tokenizer.")
        return tokenizer, None
    from lowcomm_node.models.conventions import conventions_of  # loads torch

    read = conventions_of(Path(tokenizer.file).parent, tokenizer, tokenizer.vocab)
    tokenizer = FileTokenizer(Path(tokenizer.file), read.begin_tokens, read.end_token)
    if not chat:
        return tokenizer, None
    if not read.export.chat_template:
        raise ConfigError(
            f"{Path(tokenizer.file).parent} has no chat template: put a chat_template.jinja beside "
            "the tokenizer.json."
        )
    words = words_of(tokenizer, read.export)
    return tokenizer, ChatTemplate(read.export.chat_template, words)


def _piece_bytes(text: str) -> int:
    try:
        size = read_size(text)
    except ValueError as error:
        raise ConfigError(f"--piece {error}.") from None
    if size & (size - 1) or not SMALLEST_PIECE <= size <= PIECE_BYTES:
        raise ConfigError(
            f"--piece {text}: expected a power of two from {SMALLEST_PIECE // 1024}KiB to "
            f"{PIECE_BYTES // 1024**2}MiB."
        )
    return size


def _facts(pack: "Pack") -> dict[str, Any]:
    description = pack.description.model_dump(mode="json")
    return {"file": str(pack.path), "maker": pack.maker, **description}


def _in_words(pack: "Pack") -> str:
    text, description = pack.text, pack.description
    counted = description.documents + description.held_out_documents
    left_out = f", {description.duplicates:,} copies left out" if description.duplicates else ""
    named = description.tokenizer.sha256[:12] or description.tokenizer.name
    lines = [
        f"{pack.path}: {text.tokens:,} tokens, and {text.held_out_tokens:,} held out",
        f"{counted:,} documents{left_out}; tokenizer {named}",
        f"{text.piece_count:,} pieces of {write_size(text.piece_bytes)}, {text.pieces[:16]}",
        "prompts are read, answers are learned" if text.masked else "",
        f"licence: {clean(description.licence)}" if description.licence else "",
        clean(description.words, keep="\n"),
        f"packed by {pack.maker}",
    ]
    return "\n".join(line for line in lines if line)


def _sample(pack: "Pack", file: str | None, piece: int) -> str:
    """The first words of a piece that its maker packed. Raises ConfigError, DataError."""
    from hashlib import sha256

    from lowcomm_node.data.pack import MASKED
    from lowcomm_node.data.tokenizer import open_tokenizer

    named, text = pack.description.tokenizer, pack.text
    if not 0 <= piece < text.piece_count:
        raise ConfigError(f"--piece {piece}: {pack.path} has {text.piece_count}, from 0 on.")
    if named.name == "local" and file is None:
        return "(a sample needs the tokenizer: name it with --tokenizer)"
    tokenizer = open_tokenizer(file if named.name == "local" and file else named.name)
    if named.sha256 not in ("", tokenizer.sha256):
        raise ConfigError(
            f"{file} is not the tokenizer of {pack.path}, whose SHA-256 is {named.sha256}: name "
            "that with --tokenizer."
        )
    with pack.path.open("rb") as opened:
        opened.seek(piece * text.piece_bytes)
        digest = sha256(opened.read(text.piece_bytes)).digest()
    if digest != pack.digests[piece * DIGEST_BYTES :][:DIGEST_BYTES]:
        raise DataError(f"{pack.path}: piece {piece} is not as its maker packed it: copy it again.")
    numbers = [int(number) % MASKED for number in pack.tokens(piece)[:SAMPLE_TOKENS]]
    words = tokenizer.decode([number for number in numbers if number != named.end_token])
    return clean(words, keep="\n\t")


@contextmanager
def _progress(here: Here) -> Iterator["Callable[[str], Show]"]:
    """Context with a maker of progress bars, which are on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_hidden = here.as_json or here.level < 0
    with Progress(
        TextColumn("{task.description}"), *columns, console=console, disable=is_hidden
    ) as bars:

        def begin(what: str) -> "Show":
            bar = bars.add_task(what, total=None)
            return lambda done, total, _: bars.update(bar, completed=done, total=total)

        yield begin
