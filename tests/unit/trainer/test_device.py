"""The GPU that a thread works on, and imports where there is none."""

from pathlib import Path

import pytest
import torch

from helpers.driven_trainer import driven
from lowcomm_node.trainer import building
from lowcomm_node.trainer.gpu import use


def test_a_gpu_is_named_to_torch_and_a_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", named.append)
    for name in ("cpu", "cuda:1", "mps:0", "xpu:1"):
        use(torch.device(name))
    assert list(map(str, named)) == ["cuda:1", "mps:0", "xpu:1"]


def test_a_trainer_takes_no_more_threads_than_it_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(building, "cores_allowed", lambda: 1.5)
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    with driven(tmp_path, "a", threads=None):
        assert taken[0] == 2
