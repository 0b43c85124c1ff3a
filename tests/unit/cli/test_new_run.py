"""``init`` and ``create`` tell which servers keep a run, and what its creator may have overlooked:
weights of words that never occur, and a text that is read again and again."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowcomm_node.cli import app
from lowcomm_node.cli.new_run import check_used, epochs_in_words, keeping_in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import Keeping, read_kept
from lowcomm_protocol.spec.run import RunSpec, parse_toml

DAY = 86_400.0


def test_it_tells_how_many_servers_keep_a_run_and_for_how_long():
    kept = {
        "12D3KooWaaaaaa": Keeping(kept=True, seconds=DAY),
        "12D3KooWbbbbbb": Keeping(reason="has no room"),
    }
    told = keeping_in_words(kept)
    assert "kept by 1 of 2 servers, for 24 h without a peer" in told
    assert "bbbbbb does not keep it: has no room" in told
    assert "no server" not in told
    assert "for good" in keeping_in_words({"12D3KooWaaaaaa": Keeping(kept=True)})


def test_where_no_server_keeps_it_the_remedy_is_named():
    told = keeping_in_words({"12D3KooWaaaaaa": Keeping(reason="this server has no room for it")})
    assert told.startswith(
        "aaaaaa does not keep it: this server has no room for it\nno server keeps it"
    )
    assert "--peers" in told and "--run" in told


def test_what_a_server_tells_travels_and_is_safe_to_show():
    for keeping in (Keeping(kept=True, seconds=DAY), Keeping(kept=True), Keeping(reason="full")):
        assert read_kept(pb.Kept.FromString(keeping.to_message().SerializeToString())) == keeping
    assert "\x1b" not in read_kept(pb.Kept(reason="\x1b[2J" + "x" * 999)).reason


def run(model: str = "", data: str = "", steps: int = 100) -> RunSpec:
    return parse_toml(f'[run]\nname = "a"\nsteps = {steps}\n[model]\n{model}\n[data]\n{data}\n')


def test_init_takes_the_vocabulary_of_bytes_where_no_tokenizer_is_named(tmp_path: Path):
    file = tmp_path / "run.toml"
    told = CliRunner().invoke(app, ["init", "--parameters", "30M", str(file)])
    assert told.exit_code == 0, told.output
    assert parse_toml(file.read_text()).model.vocab == 256
    assert "each peer trains on 600 million tokens, 54 epochs of the 11" in told.output


def test_words_that_never_occur_are_told_with_their_share_of_the_weights():
    wide = run("vocab = 32768\nwidth = 512\nlayers = 2\nheads = 8\nfeed_forward = 1024")
    warning = check_used(wide, 256)
    assert warning is not None
    assert "vocab = 32768, but the tokenizer has 256 tokens: 86% of" in warning
    assert "Set vocab = 256" in warning


@pytest.mark.parametrize(("vocab", "tokens"), [(256, 256), (50_304, 50_277), (32_768, None)])
def test_a_vocabulary_that_is_rounded_up_or_not_known_is_taken(vocab: int, tokens: int | None):
    assert check_used(run(f"vocab = {vocab}"), tokens) is None


def test_tokens_beside_the_size_of_a_text_are_told_as_epochs():
    stories = 'source = "builtin:stories"\ntokenizer = "builtin:stories"'
    told = epochs_in_words(run("vocab = 672\ncontext = 128", stories, steps=10_000))
    assert told is not None and "7 epochs of the 1.5 million of builtin:stories" in told
    assert epochs_in_words(run("vocab = 672\ncontext = 128", stories, steps=100)) is None
    assert epochs_in_words(run(data='source = "local"', steps=10**7)) is None
