"""Packing: the same documents from files of any kind, each once, wherever it was interrupted."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from helpers.hub_tokenizers import write_tokenizer
from lowcomm_node.data import documents, open_data, packing
from lowcomm_node.data.chat import ChatTemplate
from lowcomm_node.data.corpus import find_text
from lowcomm_node.data.documents import ReadOptions
from lowcomm_node.data.pack import MASKED, Pack
from lowcomm_node.data.packing import Packer
from lowcomm_node.data.tokenizer import BytesTokenizer, FileTokenizer, Tokenizer
from lowcomm_node.errors import ConfigError, DataError
from lowcomm_protocol.identity import Identity

MAKER = Identity(bytes(range(32)))
SEPARATOR = "<|endoftext|>"


def stories(count: int = 300, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = ["sea", "tea", "öre", "boat", "green", "old", "fox"]
    return [" ".join([f"{n}.", *draw.choices(words, k=draw.randint(5, 90))]) for n in range(count)]


def pack(
    sources: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer | None = None,
    chat: ChatTemplate | None = None,
    **options: Any,
) -> Pack:
    tokenizer = tokenizer or BytesTokenizer()
    text = find_text([*map(str, sources)], ReadOptions(end_token=0, chat=chat, **options))
    return Packer(text, out, tokenizer, MAKER, is_masked=chat is not None).pack()


def split_of(pack: Pack, held_out: bool = False, end: int = 0) -> list[bytes]:
    """The documents of a split, without their ends."""
    first, count = pack.text.training_pieces, pack.text.piece_count
    pieces = range(first, count) if held_out else range(first)
    whole = np.concatenate([pack.tokens(piece) for piece in pieces]).astype("u4")
    assert whole[-1] % MASKED == end
    parts = np.split(whole, np.flatnonzero(whole % MASKED == end) + 1)
    return [part[:-1].tobytes() for part in parts[:-1]]


def texts_of(pack: Pack) -> list[str]:
    """All documents of a pack of bytes, training text first."""
    found = split_of(pack) + split_of(pack, held_out=True)
    return [np.frombuffer(text, "u4").astype("u1").tobytes().decode() for text in found]


def lines_of(texts: Sequence[object], field: str = "text") -> bytes:
    return "".join(json.dumps({"n": 1, field: text}) + "\n" for text in texts).encode()


def write_arrow(path: Path, texts: Sequence[object]) -> None:
    """As datasets.save_to_disk does."""
    table = pyarrow.table({"n": [1] * len(texts), "text": texts})
    path.mkdir()
    with pyarrow.ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=70)
    for name in ("dataset_info.json", "state.json"):
        (path / name).write_text("{}")


def write_tokens(path: Path, texts: Sequence[str], header: bool) -> None:
    """As llm.c does, with a token before each document; or as nanoGPT, with one behind it."""
    ends = [b"\0" + text.encode() if header else text.encode() + b"\0" for text in texts]
    tokens = np.frombuffer(b"".join(ends), "u1").astype("<u2")
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, len(tokens)
    path.write_bytes((head.tobytes() if header else b"") + tokens.tobytes())


def write_kinds(folder: Path, texts: list[str]) -> dict[str, Path]:
    """The same texts in files of each kind."""
    files = {
        name: folder / name
        for name in ("a.txt", "a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "a.parquet", "hub", "disk")
    }
    files["a.txt"].write_text(f"\n{SEPARATOR}\n".join(texts))
    files["a.jsonl"].write_bytes(lines_of(texts))
    files["b.jsonl.gz"].write_bytes(gzip.compress(lines_of(texts)))
    halves = [zstandard.compress(lines_of(half)) for half in (texts[:100], texts[100:])]
    files["c.jsonl.zst"].write_bytes(b"".join(halves))
    table = pyarrow.table({"n": [1] * len(texts), "text": texts})
    pyarrow.parquet.write_table(table, files["a.parquet"], row_group_size=110)
    (files["hub"] / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(table, files["hub"] / "data" / "train-00000-of-00001.parquet")
    (files["hub"] / "README.md").write_text("---\nlicense: mit\n---\nStories.")
    write_arrow(files["disk"], texts)
    return files


def test_the_same_documents_make_the_same_pack_from_files_of_any_kind(tmp_path: Path) -> None:
    texts = stories()
    packs = {
        name: pack([path], tmp_path / f"{name}.pack", separator=SEPARATOR)
        for name, path in write_kinds(tmp_path, texts).items()
    }
    assert len({made.text.pieces for made in packs.values()}) == 1, packs
    made = packs["a.jsonl"]
    assert sorted(texts_of(made)) == sorted(texts)
    assert made.description.documents + made.description.held_out_documents == len(texts)
    assert 3 < made.description.held_out_documents < 40


@pytest.mark.parametrize("header", [True, False], ids=["llm.c", "nanoGPT"])
def test_tokens_of_other_programs_keep_their_documents(tmp_path: Path, header: bool) -> None:
    texts = stories()
    write_tokens(tmp_path / "train.bin", texts[20:], header)
    write_tokens(tmp_path / "val.bin", texts[:20], header)
    made = pack([tmp_path], tmp_path / "a.pack")
    whole = texts_of(made)
    assert sorted(whole) == sorted(texts)
    assert set(whole[-20:]) == set(texts[:20]), "the file val.bin is held out"
    private = open_data(str(tmp_path / "*.bin"), "bytes", tmp_path / "cache")
    assert private.train.tokens + private.held_out.tokens == sum(len(t.encode()) + 1 for t in texts)
    small = np.full(40, 300, "<u2")
    (tmp_path / "train.bin").write_bytes(small.tobytes())
    with pytest.raises(DataError, match=r"token 300, and bytes has 256"):
        pack([tmp_path / "train.bin"], tmp_path / "b.pack")


def test_copies_are_dropped_and_none_of_held_out_text_is_trained_on(tmp_path: Path) -> None:
    texts = stories(60)
    (tmp_path / "train.jsonl").write_bytes(lines_of(texts[10:] + texts[:15] + [texts[30]]))
    (tmp_path / "validation.jsonl").write_bytes(lines_of(texts[:10]))
    made = pack([tmp_path], tmp_path / "a.pack")
    assert sorted(texts_of(made)[:-10]) == sorted(texts[10:])
    assert texts_of(made)[-10:] == texts[:10]
    assert made.description.duplicates == 10 + 5 + 1


def test_neighbours_come_from_all_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 100)
    texts = stories()
    (tmp_path / "a.jsonl").write_bytes(lines_of(texts))
    made = pack([tmp_path / "a.jsonl"], tmp_path / "a.pack")
    training = texts_of(made)[: made.description.documents]
    heaps = [sha256(text.encode()).digest()[0] for text in training]
    assert heaps == sorted(heaps) and len(set(heaps)) > 100
    places = [texts.index(text) for text in training]
    assert all(
        a < b for (a, b), (x, y) in zip(pairwise(places), pairwise(heaps), strict=True) if x == y
    )


def test_copies_of_a_long_text_are_found_before_any_of_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 50_000)
    long = "\n".join(stories(1000))
    (tmp_path / "texts").mkdir()
    for name, text in (("a", long), ("b", long), ("c", long + "!"), ("d", "short")):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    made = pack([tmp_path / "texts"], tmp_path / "a.pack")
    assert made.description.documents + made.description.held_out_documents == 3
    assert made.description.duplicates == 1
    tokens = made.text.tokens + made.text.held_out_tokens
    assert tokens == 3 + 2 * len(long.encode()) + len("!short")


def test_where_no_document_is_held_out_the_end_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one " * 1000)
    made = pack([tmp_path / "a.txt"], tmp_path / "a.pack")
    assert (made.text.tokens, made.text.held_out_tokens) == (3960, 41)


@pytest.mark.parametrize(
    "kind", ["a.txt", "b.jsonl.gz", "c.jsonl.zst", "a.parquet", "disk", "long"]
)
def test_packing_goes_on_where_it_was_interrupted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(packing, "BATCH_BYTES", 3000)
    files = write_kinds(tmp_path, stories() + stories(40))
    files["long"] = tmp_path / "long.txt"
    files["long"].write_text("\n".join(stories(20_000)))
    options: dict[str, Any] = {"separator": "" if kind == "long" else SEPARATOR}
    if kind == "long":
        monkeypatch.setattr(documents, "PART_BYTES", 50_000)
    whole = pack([files[kind]], tmp_path / "whole.pack", **options)
    encode: Callable[..., Any] = packing.Packer._encode
    attempts = work = 0
    for allowed in (5, 1, 9, 1000):
        left = [allowed]

        def failing(self: Packer, batch: Any, left: list[int] = left) -> Any:
            nonlocal work
            left[0] -= 1
            if left[0] < 0:
                raise OSError("interrupted")
            work += sum(len(document.text) for document in batch.documents)
            return encode(self, batch)

        monkeypatch.setattr(packing.Packer, "_encode", failing)
        attempts += 1
        try:
            made = pack([files[kind]], tmp_path / "cut.pack", **options)
        except OSError:
            continue
        break
    assert attempts == 4
    assert work <= whole.text.tokens + whole.text.held_out_tokens, "what is kept is not done again"
    assert made.text.pieces == whole.text.pieces  # pyright: ignore[reportPossiblyUnboundVariable]
    assert made.description.duplicates == whole.description.duplicates == (kind != "long") * 40
    assert not (tmp_path / ".cut.pack.packing").exists()


def test_other_files_or_options_do_not_go_on_with_what_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(stories()))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="interrupted"):
        patched.setattr(packing, "seal", _raise)
        pack([tmp_path / "a.jsonl"], tmp_path / "a.pack")
    with pytest.raises(ConfigError, match="other files or options"):
        pack([tmp_path / "a.jsonl"], tmp_path / "a.pack", separator="x")
    pack([tmp_path / "a.jsonl"], tmp_path / "a.pack")
    with pytest.raises(ConfigError, match="exists"):
        pack([tmp_path / "a.jsonl"], tmp_path / "a.pack")


# conversations

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "one boat"},
    {"role": "assistant", "content": "a green öre"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "tea"},
]


def _raise(*_: object) -> None:
    raise OSError("interrupted")


def _tokenizer(folder: Path) -> Path:
    write_tokenizer(folder / "tokenizer.json")
    return folder / "tokenizer.json"


def learned_of(made: Pack, tokenizer: FileTokenizer) -> list[tuple[str, str]]:
    """Text of each document, and the part of it that is learned."""
    end = tokenizer.separator
    assert end is not None
    result: list[tuple[str, str]] = []
    for document in sorted(split_of(made, end=end) + split_of(made, held_out=True, end=end)):
        tokens = np.frombuffer(document, "u4")
        parts = tokens % MASKED, tokens[tokens < MASKED]
        result.append(tuple(tokenizer._tokenizer.decode([*p], False) for p in parts))  # pyright: ignore
    return result


@pytest.mark.parametrize("field", ["messages", "talk"])
def test_only_answers_are_learned(field: str, tmp_path: Path) -> None:
    tokenizer = FileTokenizer(_tokenizer(tmp_path))
    others = [[{**TALK[0], "content": f"{n}"}, *TALK[1:]] for n in range(40)]
    (tmp_path / "a.jsonl").write_bytes(lines_of([TALK[:1], *others], field))
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    made = pack([tmp_path / "a.jsonl"], tmp_path / "a.pack", tokenizer, template, column=field)
    assert made.text.masked and made.text.token_bytes == 4
    read = learned_of(made, tokenizer)
    assert len(read) == 40, "a conversation without an answer is left out"
    assert {learned for _, learned in read} == {"a green öre<|im_end|>\ntea<|im_end|>\n"}
    assert all(whole.startswith("<s><user>") for whole, _ in read)


def test_a_template_that_forgets_thoughts_makes_a_document_of_each_answer(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(_tokenizer(tmp_path))
    forgetting = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('|')[-1] }}"
    )
    talk = [TALK[0], {**TALK[1], "content": "hm|yes"}, TALK[2], {**TALK[3], "content": "so|no"}]
    others = [[TALK[0], {**TALK[1], "content": f"{n}"}] for n in range(40)]
    (tmp_path / "a.jsonl").write_bytes(lines_of([talk, TALK, *others], "messages"))
    template = ChatTemplate(forgetting, {"bos_token": ""})
    made = pack([tmp_path / "a.jsonl"], tmp_path / "a.pack", tokenizer, template, column="messages")
    learned = sorted(learned for _, learned in learned_of(made, tokenizer))
    both = "a green öre<|im_end|>\ntea<|im_end|>\n"
    assert learned[40:] == [both, "hm|yes<|im_end|>\n", "so|no<|im_end|>\n"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].update({'role': 'assistant'}) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for n in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_can_leave_its_sandbox_by_no_way(template: str) -> None:
    with pytest.raises(DataError, match="line 7: the chat template refuses"):
        ChatTemplate(template, {}).read(TALK, "messages", "line 7")


def test_a_template_with_marks_of_transformers_is_read() -> None:
    marked = TEMPLATE.replace(
        "{{ m.content }}", "{%- generation -%}{{ m.content }}{% endgeneration %}"
    )
    read = [
        [json.loads(talk) for talk in ChatTemplate(text, {}).read(TALK, "a", "b")]
        for text in (TEMPLATE, marked)
    ]
    assert read[0] == read[1] and len(read[0][0][1]) == 2
