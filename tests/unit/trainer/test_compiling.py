"""What must hold where torch can't compile for a GPU: a node that pip installed without a compiler
trains all the same."""

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowcomm_node.trainer.replica import can_compile

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Makes it as if only these were installed."""

    def make(*, compiler: str | None = "gcc", headers: bool = True, triton: bool = True) -> None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(
            shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None
        )
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: SimpleNamespace() if triton else None
        )
        if headers:
            (tmp_path / "Python.h").touch()

    return make


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_it_compiles_where_all_that_it_takes_is_there(compiler: str, machine: Machine) -> None:
    machine(compiler=compiler)
    assert can_compile()


@pytest.mark.parametrize("missing", [{"compiler": None}, {"headers": False}, {"triton": False}])
def test_it_does_not_try_where_something_is_missing(
    missing: dict[str, bool | None], machine: Machine
) -> None:
    machine(**missing)
    assert not can_compile()


def test_a_compiler_that_the_environment_names_will_do(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(compiler=None)
    monkeypatch.setenv("CC", "/opt/cc")
    assert can_compile()
