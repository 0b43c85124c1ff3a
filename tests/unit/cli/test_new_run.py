"""``init`` and ``create`` tell which servers keep a run, and what its creator may have overlooked:
weights of words that never occur, and a text that is read again and again."""

from pathlib import Path

from helpers.command_line import Cli
from helpers.open_weights import write_folder
from lowcomm_node.cli.creator import (
    check_used,
    epochs_in_words,
    keeping_in_words,
    licences_of_weights,
)
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.spec.run import RunSpec, parse_toml

DAY = 86_400.0


def test_it_tells_how_many_servers_keep_a_run_and_for_how_long():
    kept = {
        "12D3KooWaaaaaa": Keeping(kept=True, seconds=DAY),
        "12D3KooWbbbbbb": Keeping(reason="has no room"),
    }
    told = keeping_in_words(kept)
    assert "stored on 1 server; expires 24 h after the last peer leaves" in told
    assert "bbbbbb does not store it: has no room" in told
    assert "no server" not in told
    assert "for good" in keeping_in_words({"12D3KooWaaaaaa": Keeping(kept=True)})


def run(model: str = "", data: str = "", steps: int = 100) -> RunSpec:
    return parse_toml(f'[run]\nname = "a"\nsteps = {steps}\n[model]\n{model}\n[data]\n{data}\n')


def test_words_that_never_occur_are_told_with_their_share_of_the_weights():
    wide = run("vocab = 32768\nwidth = 512\nlayers = 2\nheads = 8\nfeed_forward = 1024")
    warning = check_used(wide, 256)
    assert warning is not None
    assert "vocab = 32768, but the tokenizer has 256 tokens: 86% of" in warning
    assert "Set vocab = 256" in warning


def test_tokens_beside_the_size_of_a_text_are_told_as_epochs():
    stories = 'source = "builtin:stories"\ntokenizer = "builtin:stories"'
    told = epochs_in_words(run("vocab = 672\ncontext = 128", stories, steps=10_000))
    assert told is not None and "7 epochs of the 1.5 million of builtin:stories" in told
    assert epochs_in_words(run("vocab = 672\ncontext = 128", stories, steps=100)) is None
    assert epochs_in_words(run(data='source = "local"', steps=10**7)) is None


def test_a_run_names_the_weights_and_all_licences_for_its_card(cli: Cli, tmp_path: Path) -> None:
    folder, pack, file = tmp_path / "llama|2", tmp_path / "tea.pack", tmp_path / "run.toml"
    write_folder(folder)
    (folder / "README.md").write_text("---\ntags: [a]\nlicense: apache-2.0\n---\nlicense: none\n")
    (tmp_path / "tea.txt").write_text("Tea is hot. " * 2000)
    tokenizer = "--tokenizer", str(folder / "tokenizer.json")
    text = str(tmp_path / "tea.txt"), str(pack), *tokenizer, "--piece", "16KiB"
    assert cli("data", "pack", *text, "--licence", "l" * 200).code == 0
    given = "--from", str(folder), "--adapter", "4", "--data", str(pack)
    assert cli("init", *given, str(file)).code == 0
    export = parse_toml(file.read_text()).export
    assert export.base == "llama|2"
    assert export.licences == ("apache-2.0 (llama|2)", "l" * 200)
    (folder / "README.md").write_text("---\ntags: [a]\n---\nlicense: none\n")
    assert licences_of_weights(folder) == []


def test_a_target_that_the_model_lacks_is_refused_before_the_run_is_published(
    cli: Cli, tmp_path: Path
) -> None:
    weights, file = str(write_folder(tmp_path / "llama")), tmp_path / "run.toml"
    written = cli("init", "--from", weights, "--adapter", "4", "--base", "nf4", str(file))
    assert written.code == 0
    file.write_text(file.read_text().replace('["all-linear"]', '["q_proj", "q_prj"]'))
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWPuJuZLre6ZyfpzXSxhab1UR6TYmDstThLPhqNzNEjpP8"
    refused = cli("create", str(file), "--peers", nobody)
    assert refused.code and "'q_prj', which this model does not have" in refused.err
