"""tests/unit mirrors the rooms: the test of a module lies in the folder of its room, and nothing
else lies there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def rooms() -> set[str]:
    """The folders in both packages that have any."""
    packages = (ROOT / "protocol" / "lowcomm_protocol", ROOT / "node" / "lowcomm_node")
    return {path.parent.name for package in packages for path in package.glob("*/__init__.py")}


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
