"""What must hold for an upload: all of an export and nothing else, by the owner's own login, and no
token where anybody reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.hub import Hub, hub

TOKEN = "hf_aSecretOfItsOwner"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder of an export, and what its owner put there beside it."""
    folder = tmp_path / "tea"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\ntags: [lowcomm]\n---\n# tea\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "identity.key").write_text("a secret")
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("mine")
    return folder


def run(there: Hub, home: Path, token: str | None, *more: str) -> subprocess.CompletedProcess[str]:
    """The command, with a login of the environment."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith("HF_")}
    told = {
        "HF_ENDPOINT": there.address,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    } | ({"HF_TOKEN": token} if token else {})
    command = [sys.executable, "-m", "lowcomm_node", "checkpoint", "publish", *more]
    return subprocess.run(
        command, env=kept | told, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_an_export_arrives_whole_with_the_login_of_the_environment(
    tmp_path: Path, export: Path
) -> None:
    with hub(TOKEN) as there:
        done = run(there, tmp_path, TOKEN, str(export), "alice/tea")
        assert done.returncode == 0, done.stderr
        assert there.address + "/alice/tea" in done.stdout
        assert there.created["visibility"] == "private" or there.created["private"] is True
        names = {"config.json", "README.md", "model.safetensors"}
        assert there.files == {name: (export / name).read_bytes() for name in names}
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "hf_anotherSecret"])
def test_without_a_login_that_may_write_the_remedy_is_told_and_no_token(
    tmp_path: Path, export: Path, token: str | None
) -> None:
    with hub(TOKEN) as there:
        done = run(there, tmp_path, token, str(export), "alice/tea", "-v")
        assert not there.files
    assert done.returncode == 78
    assert "hf auth login" in done.stderr and "alice/tea" in done.stderr
    assert "Secret" not in done.stdout + done.stderr
