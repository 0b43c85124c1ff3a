"""What must hold for wheel and sdist: all that is needed, nothing else, the commit, and the same
wheel from either."""

import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from lowcomm_node.system.release import BAKED, commit

ROOT = Path(__file__).parents[3]
HOUSES = {
    "lowcomm_protocol": ROOT / "protocol",
    "lowcomm_node": ROOT / "node",
    "lowcomm_bootstrap": ROOT / "bootstrap",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build_wheel(root: Path, folder: Path) -> Path:
    return Path(next(WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    return Path(next(SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources() -> Iterator[str]:
    for package, house in HOUSES.items():
        for path in (house / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(house))


def test_the_wheel_holds_every_file_of_every_package_and_no_other(wheel: Path) -> None:
    names = set(contents(wheel))
    own = {name for name in names if ".dist-info/" not in name and ".data/" not in name}
    assert own - {f"lowcomm_node/{BAKED}"} == set(sources()) - {f"lowcomm_node/{BAKED}"}
    assert "lowcomm_protocol/py.typed" in own and "lowcomm_protocol/messages/exchange_pb2.py" in own
    assert not [
        name
        for name in names
        if re.search(r"(^|/)(tests?|conftest|benchmarks)(/|\.py)|\.pyc$", name)
    ]
    (license_,) = [
        data for name, data in contents(wheel).items() if name.endswith("/licenses/LICENSE")
    ]
    assert license_ == (ROOT / "LICENSE").read_bytes()


def test_it_knows_its_commit_and_so_does_what_is_built_of_an_sdist(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    baked = contents(wheel).get(f"lowcomm_node/{BAKED}", b"").decode().strip()
    assert baked == (commit(ROOT / "node/lowcomm_node") or "")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "requirements.lock", "docs", "tests"} <= {
        path.name for path in source.iterdir()
    }
    again = build_wheel(source, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
    assert again.read_bytes() == wheel.read_bytes(), "to the bit"


def test_the_version_is_in_one_place() -> None:
    from lowcomm_node.system.release import release

    assert release() == PROJECT["version"], f"install again: {sys.executable} -m pip install -e ."
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(PROJECT['version'])} ", changes, re.M), (
        "the changelog tells of it"
    )
