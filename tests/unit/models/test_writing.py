"""What must hold where a model writes: what it reads of a conversation, where an answer ends, and
that two models are compared fairly."""

import json
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from helpers.hub_tokenizers import write_tokenizer
from helpers.open_weights import LLAMA, write_folder
from helpers.processes import command, environment
from lowcomm_node.data.tokenizer import BytesTokenizer, FileTokenizer, identify
from lowcomm_node.errors import ConfigError
from lowcomm_node.fetch.files import pin
from lowcomm_node.models.base import build_model
from lowcomm_node.models.inference import TOP_K, generate
from lowcomm_node.models.open_weights import load_weights
from lowcomm_node.models.writing import Writer
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.system.units import clean
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import parse_toml, sign_run
from lowcomm_protocol.spec.sections import ExportSettings

END, END_OF_TURN, COUNT = 1, 2, 40
SETTINGS = TransformerSettings.model_validate(LLAMA | {"vocab": 340, "context": 96})
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EXPORT = ExportSettings(bos_token_id=0, eos_token_id=(END,), chat_template=TEMPLATE)


def written_out(*texts: str) -> str:
    """The text of a conversation as the template has it."""
    roles = ("user", "assistant")
    turns = [f"<{roles[place % 2]}>{text}<|im_end|>\n" for place, text in enumerate(texts)]
    return "<s>" + "".join(turns) + "<assistant>"


def drawn(writer: Writer, text: str, seed: int) -> list[int]:
    start = writer.tokenizer.encode(text.encode()).tolist()
    return list(generate(writer.model, start, COUNT, 1.0, TOP_K, seed))


def answer_in(tokens: list[int]) -> list[int]:
    return list(takewhile(lambda token: token not in (END, END_OF_TURN), tokens))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    write_tokenizer(tmp_path / "tokenizer.json")
    opened = FileTokenizer(tmp_path / "tokenizer.json")
    return Writer(build_model(SETTINGS, seed=3).eval(), opened, EXPORT)


@pytest.mark.parametrize("end", [END, END_OF_TURN])
def test_an_answer_ends_with_the_run_s_end_and_with_the_template_s_end_of_a_turn(
    end: int, writer: Writer
) -> None:
    texts = ((seed, drawn(writer, written_out("hi"), seed)) for seed in range(200))
    seed, text = next(found for found in texts if end in found[1][1:])
    expected = writer.tokenizer.decode(answer_in(text))
    assert writer.text(["hi"], COUNT, 1.0, seed) == expected


def test_what_is_streamed_is_the_text_without_halves_of_characters(writer: Writer) -> None:
    pieces = list(writer.stream("The kettle", 96, 1.0, 1))
    assert len(pieces) > 20 and "".join(pieces) == writer.text("The kettle", 96, 1.0, 1)
    told = BytesTokenizer()
    spelled = Writer(writer.model, told, EXPORT)._pieces("a\u20ac\u00e9 \U0001f600".encode())
    assert [one for one in spelled if one] == ["a", "\u20ac", "\u00e9", " ", "\U0001f600"]


def test_the_oldest_turns_go_where_the_context_is_full(writer: Writer) -> None:
    talk = ["first", "its answer", "the next", "yes", "and?"]
    left = SETTINGS.context - len(writer.tokenizer.encode(written_out(*talk).encode()))
    assert 4 < left < COUNT
    for tokens, kept in ((left, talk), (left + 1, talk[2:])):
        expected = answer_in(drawn(writer, written_out(*kept), 4)[:tokens])
        assert writer.text(talk, tokens, 1.0, 4) == writer.tokenizer.decode(expected)


def test_a_message_that_leaves_no_room_for_an_answer_is_refused(writer: Writer) -> None:
    bare = len(writer.tokenizer.encode(written_out("").encode()))
    longest = "\x01" * (SETTINGS.context - bare - 1)
    assert writer.text([longest], 1, 1.0)
    with pytest.raises(ConfigError, match=f"takes {SETTINGS.context} tokens"):
        writer.text([longest + "\x01"], 1, 1.0)


def test_the_template_beside_a_tokenizer_serves_a_run_without_one(
    writer: Writer, tmp_path: Path
) -> None:
    bare = Writer(writer.model, writer.tokenizer, ExportSettings())
    with pytest.raises(ConfigError, match=r"put a chat_template\.jinja beside"):
        bare.text(["hi"], 8, 1.0)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("{{ bos_token }}", "<s>"))
    assert bare.text(["hi"], 8, 1.0) == writer.text(["hi"], 8, 1.0)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a' * 10 ** 11 }}", "refuses the messages"),
        ("{% set ns = namespace(x='a') %}{% for n in range(50) %}{% set ns.x = ns.x ~ ns.x %}"
         "{% endfor %}", "refuses the messages"),
        pytest.param(
            "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "too much memory or time", marks=pytest.mark.slow,
        ),
        ("{{ 'a' * 10 ** 7 }}", "is too long"),
        ("{{ ''.__class__.__base__ }}", "unsafe"),
        ("{{ raise_exception('\x1b[31mno') }}", "no"),
        ("{% for", "refuses the messages"),
    ],
)  # fmt: skip
def test_a_stranger_s_template_is_bounded_in_memory_and_time(
    template: str, why: str, writer: Writer
) -> None:
    export = ExportSettings(chat_template=template)
    with pytest.raises(ConfigError, match=why) as refused:
        Writer(writer.model, writer.tokenizer, export).text(["hi"], 8, 1.0)
    assert str(refused.value).isprintable()


# commands


@pytest.fixture
def home(writer: Writer, tmp_path: Path) -> Path:
    """A home with a run that began with open weights, and a checkpoint of another model."""
    open_folder = write_folder(tmp_path / "open", vocab=SETTINGS.vocab, context=SETTINGS.context)
    of_run = tmp_path / "home" / "runs" / "abc"
    (of_run / "start").mkdir(parents=True)
    weights = open_folder / "model.safetensors"
    export = {"bos_token_id": 0, "eos_token_id": [END], "chat_template": TEMPLATE}
    tables: dict[str, Any] = {
        "run": {"name": "tea"}, "model": SETTINGS.model_dump(), "data": {"tokenizer": "local"},
        "export": export, "start": {"files": [pin(weights).model_dump()]},
    }  # fmt: skip
    (of_run / "start" / weights.name).symlink_to(weights)
    run = sign_run(parse_toml(tomlkit.dumps(tables)), Identity(bytes(32)))
    (of_run / "run.json").write_bytes(run.to_bytes())
    shutil.copy(writer.tokenizer.file, of_run / "tokenizer.json")
    meta = {"model": SETTINGS.model_dump(), "tokenizer": identify(writer.tokenizer)}
    tensors = {name: one.detach() for name, one in writer.model.named_parameters()}
    CheckpointStore(of_run / "checkpoints").save(7, {"weights": tensors}, meta, 1.7e9)
    return tmp_path / "home"


def began(home: Path, writer: Writer) -> Writer:
    """The writer of the weights that the run began with."""
    model = build_model(SETTINGS, seed=0).eval()
    load_weights(model, [home / "runs" / "abc" / "start" / "model.safetensors"])
    return Writer(model, writer.tokenizer, EXPORT)


def ran(home: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    whole = command("lowcomm_node", "generate", *arguments, "--home", str(home))
    return subprocess.run(
        whole, input=typed, capture_output=True, text=True, timeout=120, env=environment()
    )


@pytest.mark.slow
def test_a_conversation_goes_on_until_an_empty_line(home: Path, writer: Writer) -> None:
    draw = "--tokens", "9", "--seed", "3", "--temperature", "1"
    done = ran(home, "--chat", "--json", *draw, typed="hi\nand now?\n\nnot read\n")
    first = writer.text(["hi"], 9, 1.0, 3)
    second = writer.text(["hi", first, "and now?"], 9, 1.0, 3)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["prompt"], one["text"]) for one in told] == [("hi", first), ("and now?", second)]
    assert done.returncode == 0 and "a checkpoint" in done.stderr


@pytest.mark.slow
def test_both_models_write_with_one_seed_below_plain_headings(home: Path, writer: Writer) -> None:
    draw = "--compare", "--tokens", "9", "--seed", "3", "--temperature", "1"
    before, after = (one.text("The ", 9, 1.0, 3) for one in (began(home, writer), writer))
    assert before != after
    shown = ran(home, "The ", *draw).stdout
    whole = (clean(text, keep="\n\t") for text in (before, after))
    heads = "by the weights that the run began with:", "by the checkpoint:"
    sections = (f"{head}\nThe {text}\n" for head, text in zip(heads, whole, strict=True))
    assert shown == "\n".join(sections)
    told = json.loads(ran(home, "--chat", "hi", "--json", *draw).stdout)
    answers = (one.text(["hi"], 9, 1.0, 3) for one in (began(home, writer), writer))
    assert (told["before"], told["text"]) == tuple(answers)


@pytest.mark.slow
def test_a_comparison_is_refused_where_nothing_is_left_of_the_beginning(home: Path) -> None:
    of_run = home / "runs" / "abc"
    (of_run / "start" / "model.safetensors").unlink()
    assert "start/model.safetensors is missing" in ran(home, "--compare").stderr
    spec = parse_toml(tomlkit.dumps({"run": {"name": "tea"}, "model": SETTINGS.model_dump()}))
    (of_run / "run.json").write_bytes(sign_run(spec, Identity(bytes(32))).to_bytes())
    done = ran(home, "--compare")
    assert done.returncode == 78 and "began with random weights" in done.stderr
