"""Tables of what a run can choose by name, and what is needed to check such a choice.

Any package may register more entries. An entry may be the text ``module:name`` in place of the
object. It is then imported when it is first used: a bootstrap server, which checks names and
computes nothing, loads no numba and no torch.
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, TypeVar, cast, get_args

from lowcomm_protocol.errors import SpecError

Entry = TypeVar("Entry")


class Table(UserDict[str, Entry]):
    """Entries by name, in order of registration."""

    def __init__(self, what: str, entries: Mapping[str, Entry | str]) -> None:
        super().__init__(cast("Mapping[str, Entry]", entries))
        self.what = what
        """Kind of entry, for errors."""

    def register(self, name: str, entry: Entry | str) -> None:
        """Add an entry. Raises SpecError if the name is taken."""
        if name in self:
            raise SpecError(f"{self.what} {name!r} is registered already: choose another name.")
        self[name] = cast("Entry", entry)

    def unregister(self, name: str) -> None:
        """Remove an entry. Raises SpecError if there is none."""
        self.check(name)
        del self[name]

    def check(self, name: str) -> None:
        """Raise SpecError, which lists what there is, unless there is an entry of this name."""
        if name not in self:
            raise SpecError(f"{self.what} {name[:80]!r} is {self.unknown(name)}")

    def unknown(self, name: str) -> str:
        """What an error says of a name that is not here: the nearest one, and all there are."""
        near = get_close_matches(name[:80], self, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"not known{meant} There are {', '.join(self)}"

    def __getitem__(self, name: str) -> Entry:
        entry = self.data[name]
        if isinstance(entry, str):
            entry = self.data[name] = cast("Entry", load(entry))
        return entry


def load(where: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


NEXT_TO_OWN = "is decoded next to the receiver's own vector"


@dataclass(frozen=True)
class CodecEntry:
    """A codec, and which runs may choose it."""

    codec: object
    """A `FixedCodec`, or what makes a `Coder` of so many values; itself or ``module:name``."""
    coarse: bool = False
    """Too coarse for absolute values, as with a consensus term; not for differences."""
    only_in_pairs: str = ""
    """Why groups can't use it; empty where they can."""
    version: int = 1
    """Goes up when its bytes change. Peers of different versions refuse each other's offers."""


_CODECS = "lowcomm_protocol.codecs."
CODECS: Table[CodecEntry] = Table(
    "codec",
    {
        "fp32": CodecEntry(_CODECS + "plain:FP32"),
        "bf16": CodecEntry(_CODECS + "plain:BF16"),
        "int8": CodecEntry(_CODECS + "blocks:INT8", coarse=True),
        "e3m0": CodecEntry(_CODECS + "blocks:E3M0", coarse=True),
        "q2": CodecEntry(_CODECS + "blocks:Q2_CODEC", coarse=True),
        "mod3": CodecEntry(_CODECS + "modulo:MOD3", only_in_pairs=NEXT_TO_OWN, version=3),
        "mod4": CodecEntry(_CODECS + "modulo:MOD4", only_in_pairs=NEXT_TO_OWN, version=3),
        "mod6": CodecEntry(_CODECS + "modulo:MOD6", only_in_pairs=NEXT_TO_OWN, version=3),
        "mod8": CodecEntry(_CODECS + "modulo:MOD8", only_in_pairs=NEXT_TO_OWN, version=3),
    },
)

RETIRED_CODECS: Mapping[str, CodecEntry] = {"q1": CodecEntry(None, coarse=True)}
"""Codecs of earlier releases. Runs that use them can be read, but not trained in."""


def codec_in_offer(name: str) -> str:
    """What offers call a codec: ``NAME``, or ``NAME/VERSION`` once its bytes have changed."""
    version = CODECS[name].version
    return name if version == 1 else f"{name}/{version}"


def codec_of_offer(text: str) -> str:
    """The name of a codec, of what `codec_in_offer` gave."""
    return text.partition("/")[0]


Mean = Literal["mean", "clip", "median", "trimmed"]
"""How a group of three or more averages: see robust.py."""
MEANS: tuple[Mean, ...] = get_args(Mean)

BLOCK = 256
"""Values that codecs code together. Shards of a group and pieces of a state begin at a block."""
MAX_GROUP = 32
"""Most peers that meet in one exchange: lists of members travel as 32 bits."""

PAIRINGS: Table[Any] = Table(
    "pairing",
    {
        "hypercube": "lowcomm_protocol.matching:hypercube",
        "random": "lowcomm_protocol.matching:random_pairs",
    },
)
"""Whom a peer of a pair meets first: ``matching.Pairing``."""

OUTER_RULES: Table[Any] = Table(
    "outer rule",
    {
        "nesterov": "lowcomm_protocol.exchange.rules:NESTEROV",
        "noloco": "lowcomm_protocol.exchange.rules:NOLOCO",
    },
)
"""What a group does with its mean: ``spec.outer.OuterRule``."""

MODELS: Table[Any] = Table(
    "kind of model",
    {
        "transformer": "lowcomm_protocol.spec.models:TransformerSettings",
        "transformers": "lowcomm_protocol.spec.models:TransformersSettings",
    },
)
"""The section ``[model]`` by its ``kind``: a class of ``spec.settings.ModelSettings``."""
