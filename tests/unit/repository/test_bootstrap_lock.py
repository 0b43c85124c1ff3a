"""What a bootstrap server installs: a part of what everybody has, at the same versions, and whole
without torch."""

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from helpers.frugal import listed, name_of

ROOT = Path(__file__).resolve().parents[3]

LOCK = listed(ROOT / "bootstrap" / "requirements.lock")
NEVER_IMPORTED = {
    "torch",
    "scipy",
    "configargparse",
    "grpcio-tools",
    "packaging",
    "prefetch-generator",
    "pyyaml",
}
"""What hivemind asks for, and the modules of it that we use do not import; tests/swarm/test_door.py
runs without them."""


def test_its_versions_are_those_of_everybody() -> None:
    everybody = listed(ROOT / "requirements.lock")
    assert LOCK and {name: everybody.get(name) for name in LOCK} == LOCK


def test_what_its_packages_ask_for_is_there_or_known_to_be_needless() -> None:
    asked = {
        name_of(wanted.name)
        for package in LOCK
        for wanted in map(Requirement, requires(package) or [])
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    }
    assert asked - set(LOCK) == NEVER_IMPORTED
