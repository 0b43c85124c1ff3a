"""All peers of a run use one tokenizer: the run says which, others are refused, and checkpoints
remember it."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_settings
from helpers.trainer_thread import TrainerThread
from lowcomm_node.cli.creator import name_tokenizer
from lowcomm_node.data import open_tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.files import RunFile, tokenizer_of
from lowcomm_node.models.writing import open_writer
from lowcomm_node.node.messages import Generate, Save
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import MAX_TOKENIZER_BYTES, PIECE_BYTES, digest_of_pieces

VOCAB = 264
RUN = '[run]\nname = "a"\n'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tokenizers of the same size that number their tokens in other ways."""
    library: Any = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = folder / "ours.json", folder / "theirs.json"
    for path, text in zip(
        paths, ("one two three four five", "un deux trois quatre cinq"), strict=True
    ):
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=VOCAB,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([text * 9], trainer)
        tokenizer.save(str(path))
    return paths


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def local(sha: str = "", vocab: int = VOCAB) -> str:
    return f'[data]\ntokenizer = "local"\ntokenizer_sha256 = "{sha}"\n[model]\nvocab = {vocab}\n'


def whole(path: Path) -> RunFile:
    """What a run says of a tokenizer's file of one piece: its size binds every giver."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return RunFile("tokenizer.json", digest, path.stat().st_size, digest_of_pieces([digest]))


# The specification


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[data]\ntokenizer = "local"\ntokenizer_sha256 = "ab"\n', "tokenizer_sha256 = 'ab'"),
        (f'[data]\ntokenizer_sha256 = "{"a" * 64}"\n', 'set "local", or remove it'),
        ("[data]\ntokenizer_size = 5\n", 'set "local", or remove it'),
        ('[data]\ntokenizer = "local"\ntokenizer_size = 5\n', "go together"),
        (f'[data]\ntokenizer = "local"\ntokenizer_pieces = "{"a" * 64}"\n', "go together"),
        ("[model]\nvocab = 255\n", 'too small for tokenizer = "bytes": set vocab = 256'),
    ],
)
def test_what_can_not_be_is_refused_before_a_run_is_signed(text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_toml(RUN + text)
    assert told in str(caught.value)


def test_a_tokenizer_above_a_piece_of_weights_is_taken_and_cut_as_they_are(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    large = tmp_path / "large.json"
    content = files[0].read_bytes()
    large.write_bytes(content + b"\n" * (PIECE_BYTES + 5 - len(content)))
    spec = name_tokenizer(parse_toml(RUN + local()), str(large))
    data = large.read_bytes()
    digests = [hashlib.sha256(one).digest() for one in (data[:PIECE_BYTES], data[PIECE_BYTES:])]
    assert tokenizer_of(spec) == replace(
        whole(large), size=PIECE_BYTES + 5, pieces=digest_of_pieces(digests)
    )
    with large.open("ab") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ConfigError, match="more than 67,108,864 bytes"):
        open_tokenizer(str(large))


def test_create_writes_the_tokenizer_of_the_creator_into_the_run(files: tuple[Path, Path]) -> None:
    named = name_tokenizer(parse_toml(RUN + local()), str(files[0]))
    assert named.data.tokenizer_sha256 == sha256(files[0])
    assert tokenizer_of(named) == whole(files[0])
    assert name_tokenizer(named, str(files[0])) == named
    assert name_tokenizer(named, None) == named, "the run names it already"
    assert name_tokenizer(parse_toml(RUN), str(files[0])) == parse_toml(RUN), (
        "a run on bytes needs none"
    )


def test_create_refuses_a_run_whose_peers_could_not_train_it(files: tuple[Path, Path]) -> None:
    def refusal(text: str, path: Path | None) -> str:
        with pytest.raises(ConfigError) as caught:
            name_tokenizer(parse_toml(RUN + text), path and str(path))
        return str(caught.value)

    assert "name yours with --tokenizer PATH" in refusal(local(), None)
    assert "how large it is" in refusal(local(sha256(files[0])), None), "of an earlier release"
    assert f"model.vocab = 263 is too small for the tokenizer {files[0]}" in refusal(
        local(vocab=263), files[0]
    )
    other = refusal(local(sha256(files[1])), files[0])
    assert sha256(files[0]) in other and sha256(files[1]) in other


# Training


async def test_a_checkpoint_remembers_its_tokenizer_and_generate_finds_it(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.json"
    shutil.copy(files[0], mine)
    text = tmp_path / "text"
    text.write_text("one two three four five\n" * 500)
    table = f'[data]\nsource = "local"\ntokenizer = "local"\ntokenizer_sha256 = "{sha256(mine)}"\n'
    table += '[export]\nchat_template = "{{ messages[-1].content }} two"\n'
    settings = tiny_settings(
        tmp_path / "run", "checkpoints", table, tokenizer=str(mine), data=str(text)
    )
    settings = settings.model_copy(
        update={"spec": settings.spec.replace('"vocab":256', f'"vocab":{VOCAB}')}
    )
    trainer = TrainerThread()
    try:
        await trainer.start(settings)
        path = Path((await trainer.ask(Save())).path)
        draw: dict[str, Any] = {"tokens": 5, "temperature": 0.0, "seed": 0}
        running = (await trainer.ask(Generate(prompt="one two", **draw))).text
        answer = (await trainer.ask(Generate(prompt="", chat=("five", "", "one"), **draw))).text
    finally:
        await trainer.stop()
    told = json.loads((path / "manifest.json").read_text())["content"]["meta"]["tokenizer"]
    assert told == {"file": "mine.json", "sha256": sha256(mine)}
    mine.unlink()
    assert answer == running, "whose chat template makes the same text"
    assert open_writer(path).text("one two", 5, 0.0) == running, "by the copy that the home keeps"
    out = CheckpointStore(path.parent).export(0, tmp_path / "out")
    assert sha256(out / "tokenizer.json") == told["sha256"], "and an export takes it along"
