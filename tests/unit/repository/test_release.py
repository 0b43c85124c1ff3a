"""What must hold for a release: it is what is committed and dated, and the forge runs what anybody
can run."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

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
