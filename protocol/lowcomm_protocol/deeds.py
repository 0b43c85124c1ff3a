"""Deeds: what a peer did to another, by how much it is held against it (peers/trust.py)."""

from enum import StrEnum


class Deed(StrEnum):
    """What a peer did."""

    STUMBLE = "stumble"
    """What happens to honest peers: see ``Trust.stumbled``."""
    LIGHT = "light"
    HEAVY = "heavy"
