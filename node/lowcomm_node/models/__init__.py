"""Models: their families, loading from a checkpoint, sampling and evaluation.

A family is in ``models/NAME.py``; its settings are in ``spec/models.py`` of the protocol, and its
line in ``names.MODELS``. Another package calls ``register``. Nothing here loads torch.
"""

from typing import Any

from lowcomm_protocol.spec.names import MODELS, Table

FAMILIES: Table[Any] = Table(
    "kind of model", {kind: f"{__name__}.{kind}:FAMILY" for kind in MODELS}
)
"""``base.Family`` by ``model.kind``."""


def register(kind: str, family: Any, settings: Any) -> None:
    """Add a family, and the section ``[model]`` of its runs: a ``ModelSettings``.

    Both may be named as ``module:name``. Raises SpecError if the kind is taken.
    """
    MODELS.register(kind, settings)
    FAMILIES.register(kind, family)


def unregister(kind: str) -> None:
    """Remove a family. Raises SpecError if there is none."""
    FAMILIES.unregister(kind)
    MODELS.unregister(kind)
