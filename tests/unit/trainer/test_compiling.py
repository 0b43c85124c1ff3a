"""What must hold where torch can't compile for a GPU: a node that pip installed without a compiler
trains all the same."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowcomm_node.trainer.gpu import FOLDERS, prepare

Machine = Callable[..., None]


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
