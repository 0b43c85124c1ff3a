"""Deeds: what a peer did to another, by severity (peers/trust.py)."""

from enum import StrEnum


class Deed(StrEnum):
    """What a peer did."""

    STUMBLE = "stumble"
    """Happens to honest peers: see ``Trust.stumbled``."""
    LIGHT = "light"
    HEAVY = "heavy"
