"""What must hold for the process of a trainer."""

import pytest

from lowcomm_node.node import host


def test_it_has_what_it_needs_before_it_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def step_back(level: int) -> None:
        done.append(f"step back to {level}")
        raise SystemExit

    monkeypatch.setattr(host, "die_with_parent", lambda: None)
    monkeypatch.setattr(host, "load", lambda: done.append("load"))
    monkeypatch.setattr(host, "step_back", step_back)
    monkeypatch.setattr(host.sys, "argv", ["host", "19", "3", "4"])
    with pytest.raises(SystemExit):
        host.main()
    assert done == ["load", "step back to 19"]
