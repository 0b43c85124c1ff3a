"""What must hold for an export that the page asks for: it is the command's, and fails in words."""

import sys
from pathlib import Path

import pytest

from lowcomm_node.errors import NodeError
from lowcomm_node.node.controls import export_newest


async def test_what_the_command_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'a line before' >&2\necho 'error: no room' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(NodeError, match=r"^no room$"):
        await export_newest(tmp_path, "e1f145ac155e", "hf")


async def test_what_was_written_is_told_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "{\\"step\\": 7, \\"missing\\": \\"$*\\"}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    told = await export_newest(tmp_path, "e1f145ac155e", "gguf")
    assert told.step == 7
    assert Path(told.path).parent == tmp_path / "exports"
    assert f"checkpoint export {told.path} --format gguf --run e1f145ac155e" in told.missing
    assert told.missing.endswith(f"--home {tmp_path} --json")
