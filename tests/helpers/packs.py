"""Small packs, of given tokens or of private text."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data import open_data, packing
from lowcomm_node.data.pack import Pack, PackTokenizer, seal, token_type
from lowcomm_protocol.identity import Identity


def write_pack(
    path: Path,
    train: Iterable[NDArray[Any]],
    held_out: Iterable[NDArray[Any]],
    tokenizer: PackTokenizer | None = None,
    *,
    masked: bool = False,
) -> Pack:
    """Write documents of tokens, which end with their separator, as a pack."""
    tokenizer = tokenizer or PackTokenizer(end_token=0)
    kind = token_type(tokenizer.vocab, masked)
    whole = [np.concatenate(list(split)).astype(kind).tobytes() for split in (train, held_out)]
    folder = path.with_name(f"{path.name}.writing")
    folder.mkdir()
    (folder / "train").write_bytes(whole[0])
    (folder / "held_out").write_bytes(whole[1])
    sizes, maker = (len(whole[0]), len(whole[1])), Identity(bytes(range(32)))
    return seal(path, folder / "train", sizes, maker, tokenizer, None, masked, {})


def make_cache(source: Path, cache: Path) -> None:
    """Tokenize a text in small batches, each of which the journal notes."""
    packing.SAVE_SECONDS, packing.BATCH_BYTES = -1.0, 10_000
    open_data(str(source), "bytes", cache)
