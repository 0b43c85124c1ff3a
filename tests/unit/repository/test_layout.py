"""tests/unit mirrors the rooms: the test of a module lies in the folder of its room, and nothing
else lies there."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
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


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone, so it would stop at the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def calls_without_encoding(source: str) -> Iterator[int]:
    """Lines that read or write text as the locale has it."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        named = {keyword.arg for keyword in call.keywords}
        modes = [one.value for one in call.args if isinstance(one, ast.Constant)]
        is_text = (
            (name in ("read_text", "write_text") and len(call.args) < 2)
            or (name in ("open", "fdopen") and any(re.fullmatch("[rwax+]+", str(m)) for m in modes))
            or ("text" in named and name in ("run", "Popen", "check_output"))
        )
        if is_text and "encoding" not in named:
            yield call.lineno


def test_text_is_read_and_written_in_utf_8_whatever_the_locale() -> None:
    wrong = 'a.read_text()\na.write_text(b)\nopen(a, "w")\nrun(a, text=True)'
    assert sorted(calls_without_encoding(wrong)) == [1, 2, 3, 4]
    assert not [*calls_without_encoding('a.read_text(encoding="utf-8")\nopen(a, "rb")')]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("protocol", "node", "bootstrap", "docker/entry")
        for path in (ROOT / folder).rglob("*.py")
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []
