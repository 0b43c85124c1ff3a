"""What a run specification can choose from, by name, and what must be known of it to check a specification.

What computes is elsewhere (codecs/, robust.py), and takes numba and torch: a bootstrap server checks specifications without them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

ABSOLUTE_CODECS = ("fp32", "bf16")
"""Fine enough to carry absolute values (``phi``, or ``c`` with a consensus term), and not only differences."""
COARSE_CODECS = ("int8", "e3m0", "q2", "q1")
MODULO_BITS: Mapping[str, int] = MappingProxyType({"mod3": 3, "mod4": 4, "mod6": 6, "mod8": 8})
"""Bits a value of each codec that decodes next to the receiver's own vector."""
CODEC_NAMES = (*ABSOLUTE_CODECS, *COARSE_CODECS, *MODULO_BITS)

Mean = Literal["mean", "clip", "median", "trimmed"]
"""How a group of three or more averages: see robust.py."""
MEANS: tuple[Mean, ...] = get_args(Mean)

Pairing = Literal["hypercube", "random"]
"""Whom a peer of a pair meets: see matching.py."""
