"""``data`` on the command line: docs/data.md line by line, and what is refused."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from helpers.following import lines
from helpers.hub_tokenizers import CHAT, write_tokenizer
from lowcomm_node.cli import app
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import run_app
from lowcomm_protocol.spec.run import parse_toml

Cli = Callable[[str], tuple[int, str, str]]
ONLINE = ("create", "join", "amend")
"""Commands of the page that tests/swarm follows."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.setenv("LOWCOMM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        code = run_app(app, find_p2pd)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The files that the page names."""
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Tea number {number}. " * 200)
    bodies = [json.dumps({"body": f"Page {number} of a crawl. " * 40}) for number in range(60)]
    (tmp_path / "crawl.jsonl.zst").write_bytes(zstandard.compress("\n".join(bodies).encode()))
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    with (tmp_path / "talks.jsonl").open("w") as file:
        for number in range(60):
            roles = {"user": f"And {number}?", "assistant": f"Tea {number}."}
            talk = [{"role": role, "content": content} for role, content in roles.items()]
            file.write(json.dumps({"messages": talk}) + "\n")
    return tmp_path


def test_every_line_of_the_page_does_what_it_says(cli: Cli, texts: Path) -> None:
    printed: dict[str, str] = {}
    for line in lines("data.md", end=""):
        if line.split()[1] not in ONLINE and "data serve" not in line:
            code, printed[line], err = cli(line)
            assert code == 0, f"{line}: {err}"
    shown = next(out for line, out in printed.items() if " show " in line)
    assert "Tea number" in shown and "Page " in shown and "60 documents" in shown
    assert "answers are learned" in printed[next(line for line in printed if "--chat" in line)]
    spec = parse_toml((texts / "run.toml").read_text())
    described: dict[str, Any] = json.loads((texts / "tea.pack.json").read_text())["description"]
    assert spec.data.parts[0].model_dump() == {**described["text"], "mirrors": ()}


def test_several_packs_of_one_tokenizer_share_the_windows_by_their_tokens(
    cli: Cli, texts: Path
) -> None:
    for line in ("texts a", "texts/1*.txt b", "texts d --tokenizer tokenizer.json"):
        assert cli(f"lowcomm-node data pack {line} --piece 16KiB")[0] == 0
    assert cli("lowcomm-node init --data a.pack --data b.pack run.toml")[0] == 0
    spec = parse_toml((texts / "run.toml").read_text())
    assert [part.name for part in spec.data.parts] == ["a", "b"]
    ratio = spec.data.parts[1].tokens / spec.data.parts[0].tokens
    assert spec.data.parts[1].share == pytest.approx(ratio / (1 + ratio), abs=1e-4)
    for options, words in (
        ("--data a.pack --data d.pack", "different tokenizers: pack both with one"),
        ("--data d.pack", "needs --tokenizer with the file of SHA-256"),
        ("--data a.pack --tokenizer tokenizer.json", "needs no --tokenizer, its own is bytes"),
        ("--data texts", "neither a pack nor a folder of packs"),
    ):
        code, _, err = cli(f"lowcomm-node init --force {options} run.toml")
        assert code == 78 and words in err
    assert cli("lowcomm-node init --force --data d.pack --tokenizer tokenizer.json r.toml")[0] == 0
    spec = parse_toml((texts / "r.toml").read_text())
    assert spec.data.tokenizer == "local" and spec.model.vocab > 256 and spec.data.end_token == 1


def test_what_a_maker_writes_does_not_rewrite_the_terminal(cli: Cli, texts: Path) -> None:
    (texts / "texts" / "0.txt").write_text("\x1b[2J" * 40)
    assert cli("lowcomm-node data pack texts/0.txt a --words '\x1b[31mred\nend'")[0] == 0
    _, shown, _ = cli("lowcomm-node data show a.pack")
    assert "\x1b" not in shown and " [31mred\nend" in shown and " [2J [2J" in shown


def test_damage_is_named_and_so_is_what_cannot_be_packed(cli: Cli, texts: Path) -> None:
    assert cli("lowcomm-node data pack texts a")[0] == 0
    with (texts / "a.pack").open("r+b") as file:
        file.seek(16 * 1024 + 5)
        file.write(b"?")
    for line, words in (
        ("verify a.pack", "piece 1 (bytes 16,384 to 32,768) is not as its maker packed it"),
        ("show a.pack --piece 1", "piece 1 is not as its maker packed it"),
        ("show a.pack --piece 99", "--piece 99"),
        ("pack texts a", "a.pack exists"),
        ("pack texts b --piece 20KiB", "expected a power of two from 16KiB to 16MiB"),
        ("pack talks.jsonl b --chat", "needs a tokenizer.json"),
        ("pack crawl.jsonl.zst b", "has no field 'text', but body: name the field with --field"),
        ("pack nothing b", "nothing names no text file"),
    ):
        code, _, err = cli(f"lowcomm-node data {line}")
        assert code == 78 and words in err, err
