"""What must hold where torch can't compile for a GPU: a node that pip installed without a compiler
trains all the same."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowcomm_node.system.machine import can_compile
from lowcomm_node.trainer.gpu import FOLDERS, prepare

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


def test_what_is_compiled_for_a_gpu_is_kept_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    precision: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    prepare(torch.device("cpu"), tmp_path)
    assert not precision and not set(FOLDERS) & set(os.environ)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/srv/triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    prepare(torch.device("cuda:1"), tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/srv/triton", "an owner's own folder stays"
    assert precision == ["high"]
