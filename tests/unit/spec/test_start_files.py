"""``[start]`` pins files by name, size and digest, and by nothing that leads out of a folder."""

import pytest
import tomlkit

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import MAX_FILES

FILE = {"name": "model.safetensors", "size": 7, "sha256": "ab" * 32, "pieces": "cd" * 32}


def text(*files: dict[str, object]) -> str:
    return tomlkit.dumps({"run": {"name": "a"}, "start": {"files": list(files)}})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "../model.safetensors"}, "start.files.0.name"),
        ({"name": "a/model.safetensors"}, "start.files.0.name"),
        ({"name": ".safetensors"}, "start.files.0.name"),
        ({"name": "model.bin"}, "start.files.0.name"),
        ({"name": "a" * 200 + ".safetensors"}, "start.files.0.name"),
        ({"size": 0}, "start.files.0.size = 0"),
        ({"size": 1 << 50}, "start.files.0.size"),
        ({"sha256": "AB" * 32}, "start.files.0.sha256"),
        ({"pieces": ""}, "start.files.0.pieces"),
        ({"sha-256": "x"}, "did you mean 'sha256'?"),
    ],
)
def test_anything_else_is_refused_by_its_name(change: dict[str, object], told: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_toml(text(FILE | change))
    assert told in str(refused.value)


def test_names_differ_and_the_list_is_bounded() -> None:
    with pytest.raises(SpecError, match="the same name"):
        parse_toml(text(FILE, FILE))
    files = [FILE | {"name": f"{number}.safetensors"} for number in range(MAX_FILES + 1)]
    parse_toml(text(*files[1:]))
    with pytest.raises(SpecError, match="at most 64"):
        parse_toml(text(*files))
