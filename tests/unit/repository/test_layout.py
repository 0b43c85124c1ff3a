"""tests/unit mirrors the rooms: the test of a module lies in the folder of its room, and nothing
else lies there."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests" / "unit"
ELSEWHERE = {"protocol", "bootstrap", "repository"}
"""Folders of tests that are not about one room: of modules beside the rooms, and of the
checkout."""


def rooms() -> set[str]:
    """The folders in both packages that have any."""
    packages = (ROOT / "protocol" / "lowcomm_protocol", ROOT / "node" / "lowcomm_node")
    return {path.parent.name for package in packages for path in package.glob("*/__init__.py")}


def test_every_unit_test_lies_in_a_folder_that_a_room_has_given_its_name() -> None:
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT.rglob("*.py")}
    assert folders, "there are tests"
    assert folders <= rooms() | ELSEWHERE


def test_what_unit_tests_share_does_not_lie_between_them() -> None:
    files = [path for path in UNIT.rglob("*.py") if path.name != "conftest.py"]
    assert [str(path) for path in files if not path.name.startswith("test_")] == []


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone, so it would stop at the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
