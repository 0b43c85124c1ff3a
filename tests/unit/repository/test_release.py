"""What must hold for a release: it is what is committed and dated, and the forge runs what anybody
can run."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_release", ROOT / "docker" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path, release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of which only the changelog is there, committed."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.3 (2026-11-22)\n\n## 1.2.2 (unreleased)\n"
    )
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one", "--no-gpg-sign"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_release_is_committed_and_dated(checkout: Path, release: ModuleType) -> None:
    release.refuse_unready("1.2.3")
    for version in ("1.2.2", "1.2"):
        with pytest.raises(
            SystemExit, match=rf"no heading '## {re.escape(version)} \(YYYY-MM-DD\)'"
        ):
            release.refuse_unready(version)
    (checkout / "CHANGELOG.md").open("a").write("\nmore\n")
    with pytest.raises(SystemExit, match="changed and not committed"):
        release.refuse_unready("1.2.3")


def test_the_forge_runs_only_what_the_makefile_does_and_every_python_that_we_name() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    jobs = workflow["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    as_root = [command for command in commands if command.startswith("sudo ")]
    assert all(" .ci/run " in command for command in as_root)
    ours = re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), re.M)
    made = [*ours, *(command for command in commands if command not in as_root)]
    assert {command.split()[0] for command in made} == {"make"}
    goals = {word for command in made for word in command.split()[1:] if re.match(r"[a-z]", word)}
    assert goals and goals <= targets
    assert [
        step["uses"]
        for step in steps
        if "uses" in step and not re.search(r"@(v\d+|[0-9a-f]{40})$", step["uses"])
    ] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)
    }
    matrices = [set(job["strategy"]["matrix"]["python"]) for job in jobs if "strategy" in job]
    assert matrices and all(matrix == named for matrix in matrices)
