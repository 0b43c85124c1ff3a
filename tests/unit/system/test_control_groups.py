"""What must hold for limits of control groups: the narrowest around us counts, wherever it is."""

from pathlib import Path

import pytest

from lowcomm_node.system import machine as groups
from lowcomm_node.system.machine import cores_allowed, memory_limits

GIB = 1024**3


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without control groups, whose files tests write."""
    monkeypatch.setattr(groups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(groups, "GROUPS", tmp_path / "groups")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def member(machine: Path, *lines: str) -> None:
    write(machine / "proc/self/cgroup", "\n".join(lines))


SERVICE, JOB = "0::/system.slice/node.service", "4:cpu,cpuacct:/job/7\n9:memory:/job/7"


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("0::/", ""),
        (SERVICE, "system.slice/node.service"),
        (SERVICE, "system.slice"),
        (SERVICE, ""),
        ("0::/../outside", ""),
        ("0::/docker/abc/inner", "inner"),
        (f"{JOB}\n0::/", "unified"),
        ("", ""),
    ],
)
def test_a_limit_of_version_2_counts_at_every_level_of_its_path(
    machine: Path, lines: str, folder: str
):
    member(machine, lines)
    (machine / "groups/system.slice/node.service").mkdir(parents=True)
    group = machine / "groups" / folder
    for name, text in {"max": GIB, "high": "max", "current": GIB // 4}.items():
        write(group / f"memory.{name}", text)
    write(group / "memory.stat", f"anon 1\ninactive_file {GIB // 8}")
    write(group / "cpu.max", "150000 100000")
    assert list(memory_limits()) == [(GIB, GIB - GIB // 4 + GIB // 8)]
    assert cores_allowed() == 1.5
    assert groups.memory_of_machine()[0] == GIB


@pytest.mark.parametrize("folder", ["", "job", "job/7"])
def test_a_limit_of_version_1_counts_at_every_level_of_its_path(machine: Path, folder: str):
    member(machine, JOB)
    for controller, files in {
        "memory": {"memory.limit_in_bytes": GIB, "memory.usage_in_bytes": GIB // 2},
        "cpu": {"cpu.cfs_quota_us": 50_000, "cpu.cfs_period_us": 100_000},
    }.items():
        (machine / "groups" / controller / "job/7").mkdir(parents=True)
        for name, text in files.items():
            write(machine / "groups" / controller / folder / name, text)
    assert list(memory_limits()) == [(GIB, GIB // 2)]
    assert cores_allowed() == 0.5


def test_the_narrowest_of_nested_limits_counts(machine: Path):
    member(machine, SERVICE)
    for folder, limit, cores in (("", "max", "max"), ("system.slice", 2 * GIB, 400_000)):
        write(machine / "groups" / folder / "memory.max", limit)
        write(machine / "groups" / folder / "cpu.max", f"{cores} 100000")
    service = machine / "groups/system.slice/node.service"
    for name, text in {
        "memory.max": 3 * GIB,
        "memory.high": GIB,
        "cpu.max": "200000 100000",
    }.items():
        write(service / name, text)
    for folder in (service, service.parent):
        write(folder / "memory.current", GIB // 2)
    assert groups.memory_of_machine() == (GIB, GIB // 2)
    assert cores_allowed() == 2.0
