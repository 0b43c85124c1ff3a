"""Private text becomes tokens once, in a cache that no crash can spoil; what is held out is never
trained on; batches resume."""

import errno
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from helpers.disk import is_killed_at, on_small_disk
from helpers.hub_tokenizers import write_tokenizer
from helpers.packs import make_cache
from lowcomm_node.data import Split, documents, open_data, open_tokenizer
from lowcomm_node.data.corpus import open_corpus, python_corpus
from lowcomm_node.data.documents import Document, ReadOptions, SourceFile, read_documents
from lowcomm_node.data.pack import find_packs
from lowcomm_node.data.sources import CSV, OTHER_JSON, kind_of
from lowcomm_node.data.stream import TrainStream, held_out_windows
from lowcomm_node.errors import ConfigError, DataError, DiskFull

TEXT = "Grüße, 世界! 🌍 naïve — one two three\n"


def texts_of(path: Path, kind: str, column: str = "text") -> list[bytes]:
    read = read_documents(SourceFile(kind, path), ReadOptions(column))
    return [document.text for document in read]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [
        "".join(draw.choices(string.ascii_letters + " ", k=60)) + f" {number}"
        for number in range(count)
    ]


def write_lines(path: Path, texts: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def split_of(tokens: Sequence[int], vocab: int = 256) -> Split:
    return Split(np.array(tokens, np.uint16), vocab)


def all_tokens(split: Any) -> list[int]:
    return split.window(0, split.tokens).tolist()


# Tokenizers


@pytest.mark.parametrize("text", [b"", b"plain", TEXT.encode(), bytes(range(256))])
def test_bytes_are_their_own_tokens(text: bytes) -> None:
    tokenizer = open_tokenizer("bytes")
    tokens = tokenizer.encode(text).tolist()
    assert bytes(tokens) == text
    assert tokenizer.decode(tokens) == text.decode(errors="replace")
    assert (tokenizer.name, tokenizer.vocab, tokenizer.separator) == ("bytes", 256, 0)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return path


def test_a_tokenizer_file_encodes_and_decodes_text(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file))
    tokens = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert len(tokens) < len(TEXT.encode()), "it joins bytes"
    assert 0 <= tokens.min() <= tokens.max() < tokenizer.vocab
    assert tokenizer.separator == 1
    assert tokenizer.decode([1, *tokens, 1]) == TEXT, "separators are not shown"
    assert len(tokenizer.encode(b"")) == 0


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b"half", b"empty"])
def test_a_file_that_is_no_tokenizer_is_named(
    tokenizer_file: Path, tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "tokenizer.json"
    if damage == b"half":
        damage = tokenizer_file.read_bytes()[:3000]
    if damage == b"empty":
        content = json.loads(tokenizer_file.read_text())
        content["added_tokens"], content["model"]["vocab"], content["model"]["merges"] = [], {}, []
        damage = json.dumps(content).encode()
    path.write_bytes(damage)
    with pytest.raises(ConfigError, match=rf"{path} is not a tokenizer\.json .*--tokenizer"):
        open_tokenizer(str(path))


# Documents


def test_a_packed_file_that_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    packed = gzip.compress("\n".join(sentences(40)).encode())
    damaged = [packed[:cut] for cut in range(1, len(packed), 97)]
    damaged += [
        packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :]
        for at in range(12, len(packed), 97)
    ]
    for content in [*damaged, b"not packed"]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path} can't be read .*: replace or remove it"):
            texts_of(path, "text")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "not a JSON object"),
        (b"\xff", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"9" * 10_000, "not a JSON object"),
        (b"[1]", "no field 'text'"),
        (b"null", "no field 'text'"),
        (b'{"Text": "a"}', "no field 'text', but Text: name the field with --field"),
        (b'{"text": 1}', "'text' holds a number, not text"),
        (b'{"text": ["a"]}', "'text' holds a list, not text"),
    ],
)
def test_a_line_that_holds_no_text_is_named(tmp_path: Path, line: bytes, word: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=word) as caught:
        texts_of(path, "jsonl")
    assert f"{path}:3" in str(caught.value)


def test_a_table_without_its_column_or_that_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"other": range(93), "body": [*sentences(90), None, "", "Grüße"]})
    pyarrow.parquet.write_table(table, path, row_group_size=30)
    assert texts_of(path, "parquet", "body")[-1] == "Grüße".encode()
    with pytest.raises(DataError, match="has no column 'text', only other, body"):
        texts_of(path, "parquet")
    with pytest.raises(DataError, match="'other' holds a number, not text"):
        texts_of(path, "parquet", "other")
    whole, refused = path.read_bytes(), 0
    damaged = [whole[:cut] for cut in range(0, len(whole), 97)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 0xD5]) + whole[at + 1 :] for at in range(0, len(whole), 17)
    ]
    for content in damaged:
        path.write_bytes(content)
        try:
            texts_of(path, "parquet", "body")  # a changed letter can't be noticed
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 80


# Kinds

LINES = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("README", b"one", "text"),
        ("a.py", b"\x0c\x1b[1m one", "text"),
        ("a.txt", "Gr\u00fc\u00dfe".encode("latin-1"), "text"),
        ("empty", b"", "text"),
        # A name of a test has these bytes: without the time, so that all workers call it the same.
        ("a.txt.gz", gzip.compress(b"one", mtime=0), "text"),
        ("a.jsonl", b"{}", "jsonl"),
        ("A.NDJSON", b"{}", "jsonl"),
        ("a.json", LINES, "jsonl"),
        ("a.json.gz", gzip.compress(LINES, mtime=0), "jsonl"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd", "jsonl"),
        ("part-00000", b"\xef\xbb\xbf\n " + LINES, "jsonl"),
        ("a.json", b'{"text": "' + b"long " * 2000, "jsonl"),
        ("a.txt", b'[\n  {"text": "one"}\n]', OTHER_JSON),
        ("a.json", b'["one"]', OTHER_JSON),
        ("a.json", b'{\n  "text": "one"\n}', OTHER_JSON),
        ("a.txt", b"[one](http://two) {three}", "text"),
        ("a.tex", b'{\\bf "one"}', "text"),
        ("a.csv", b"text,n\none,1\n", CSV),
        ("a.arrow", b"ARROW1\0\0", "arrow"),
        ("a.parquet", b"", "parquet"),
        ("a.txt", b"PAR1" + bytes(20), "parquet"),
        ("a.bin", b"\0\1", "tokens"),
        ("a.txt", b"PK\x03\x04", "not text"),
        ("a.txt", "one".encode("utf-16"), "UTF-16 rather than UTF-8"),
    ],
)
def test_a_file_is_what_its_contents_say(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert kind_of(path) == kind


def test_a_folder_of_several_kinds_is_refused_with_its_files_and_the_remedy_works(
    tmp_path: Path,
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": sentences(9)}), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", sentences(9))
    (tmp_path / "README.md").write_text("# one\ntwo\n")
    with pytest.raises(ConfigError, match="can't be read as one text") as caught:
        open_corpus(str(tmp_path))
    for words in ("a.parquet (parquet)", "b.jsonl (jsonl)", "README.md (text)", "by jsonl:"):
        assert words in str(caught.value)
    for kind, count in (("parquet", 9), ("jsonl", 9), ("text", 2)):
        assert len(list(open_corpus(f"{kind}:{tmp_path}").documents())) == count


def test_a_folder_that_can_not_be_read_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one")
    closed, scandir = tmp_path / "closed", os.scandir
    closed.mkdir()

    def refuse(path: Path) -> Any:  # permissions bind no root
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(closed))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=rf"{closed} can't be read \(.*\): correct its permiss"):
        open_corpus(str(tmp_path))


# What is trained on and what is held out


def check_splits(
    read: Iterator[tuple[int, Document]], texts: Sequence[bytes]
) -> tuple[set[bytes], set[bytes]]:
    documents = [document for _, document in read]
    assert [document.text for document in documents] == list(texts), "all, in order"
    trained = {document.text for document in documents if not document.held_out}
    held_out = {document.text for document in documents if document.held_out}
    assert not trained & held_out, "held-out text among the training text"
    return trained, held_out


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_held_out_text_is_never_trained_on_though_documents_repeat(
    tmp_path: Path, count: int
) -> None:
    texts = sentences(count, seed=count)
    for repeats in ([], texts, [texts[-1]], texts[:2] * 3 + [texts[0]]):
        for order in range(4):
            shown = repeats + texts
            random.Random(order).shuffle(shown)
            corpus = open_corpus(str(write_lines(tmp_path / "a.jsonl", shown)))
            read = corpus.documents()
            trained, held_out = check_splits(read, [text.encode() for text in shown])
            assert trained
            assert 1 <= len(held_out) <= max(1, count / 50)


def test_python_source_is_split_by_name_and_holds_nothing_of_this_machine(tmp_path: Path) -> None:
    names = [f"package{number}/module.py" for number in range(200)]
    skipped = ["test/a.py", "x/site-packages/c.py", "_sysconfigdata__linux.py", "config-3.11/d.py"]
    for name in [*names, *skipped, "README.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    corpus = python_corpus(tmp_path)
    check_splits(corpus.documents(), [f"# {name}\n".encode() for name in sorted(names)])
    assert 3 < sum(corpus.held_out) < 25
    assert [*corpus.documents(0, 7)] == [*corpus.documents()][7:], "it goes on at any row"
    for name in names:
        (tmp_path / name).write_text(f"# {name}, changed\n")
    shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("elsewhere"))
    assert python_corpus(tmp_path / "elsewhere").held_out == corpus.held_out, (
        "neither an edit nor another folder moves a file to the other side"
    )


# The cache


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "text.jsonl", sentences(300))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 300_000)


def check_data(source: Path, cache: Path) -> None:
    """The data opens, is whole, and the cache holds nothing else."""
    dataset = open_data(str(source), "bytes", cache)
    splits: tuple[list[int], list[int]] = ([], [])
    for _, document in open_corpus(str(source)).documents():
        splits[document.held_out].extend([*document.text, 0])
    assert all_tokens(dataset.train) == splits[0]
    assert all_tokens(dataset.held_out) == splits[1]
    path = pack_of(cache)
    files = {".lock", path.name, f"{path.name}.pieces", f"{path.name}.json"}
    assert {path.name for path in cache.iterdir()} == files


def pack_of(cache: Path) -> Path:
    (path,) = cache.glob("*.pack")
    return path


def test_a_changed_text_replaces_the_earlier_one_and_nobody_else_takes_it(
    source: Path, cache: Path
) -> None:
    check_data(source, cache)
    first = pack_of(cache)
    with pytest.raises(DataError, match="description of a pack"):
        find_packs(cache)
    write_lines(source, sentences(301))
    (cache / "tokens-of-an-earlier-release").mkdir()
    check_data(source, cache)
    assert pack_of(cache) != first


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("packed", [False, True])
def test_of_a_long_text_the_end_is_held_out_and_both_parts_are_whole_documents(
    tmp_path: Path, cache: Path, packed: bool
) -> None:
    text = "\n".join(sentences(18_000)).encode()
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(text) if packed else text)
    dataset = open_data(str(path), "bytes", cache)
    train, held_out = (bytes(all_tokens(split)) for split in (dataset.train, dataset.held_out))
    assert train[:-1] + held_out[:-1] == text
    assert (train[-2:], held_out[-1]) == (b"\n\0", 0)
    assert 0.009 < len(held_out) / len(text) < 0.012


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_the_parts_of_a_text_become_the_tokens_of_the_whole(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    """Tokenizers of SentencePiece put a blank before what they take for a beginning."""
    library: Any = pytest.importorskip("tokenizers")
    letters = {letter: number for number, letter in enumerate(f"▁\n{string.printable}")}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=letters, merges=[]))
    tokenizer.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "\n".join(sentences(12_000))
    path = tmp_path / f"a.{kind}"
    path.write_text(text) if kind == "text" else write_lines(path, [text, "one", "two"])
    dataset = open_data(str(path), str(tmp_path / "tokenizer.json"), cache)
    assert dataset.train.tokens + dataset.held_out.tokens > 600_000
    blanks = all_tokens(dataset.train).count(0) + all_tokens(dataset.held_out).count(0)
    assert blanks == text.count(" ") + (2 if kind == "text" else 3), (
        "one before each document, none at a cut"
    )


def test_text_that_is_not_utf8_is_named_where_letters_would_be_lost(
    tmp_path: Path, cache: Path, tokenizer_file: Path
) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes("Größe und Übermaß, déjà vu.\n".encode("latin-1") * 300)
    with pytest.raises(DataError, match=r"old\.txt is not UTF-8 \(byte 0xf6\): .*iconv"):
        open_data(str(path), str(tokenizer_file), cache)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    dataset = open_data(str(path), "bytes", cache)
    assert dataset.train.tokens + dataset.held_out.tokens == path.stat().st_size + 2


def test_a_token_beyond_the_vocabulary_is_an_error_rather_than_the_end_of_the_trainer() -> None:
    split = split_of([1, 2, 256, 3])
    assert split.window(0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match="Token 256 is not below 256: remove the data cache"):
        split.window(1, 2)


def test_a_damaged_cache_is_made_anew(source: Path, cache: Path) -> None:
    check_data(source, cache)
    pack = pack_of(cache)
    for path in (pack, pack.with_name(f"{pack.name}.pieces"), pack.with_name(f"{pack.name}.json")):
        content = path.read_bytes()
        at = content.find(b"tokens") + 9 if path.suffix == ".json" else len(content) // 2
        for damaged in (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content[:-2]):
            path.write_bytes(damaged)
            check_data(source, cache)
        path.unlink()
        check_data(source, cache)


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_nothing_that_is_taken_for_good(
    tmp_path: Path, source: Path
) -> None:
    for point in itertools.count():
        cache = tmp_path / f"cache-{point}"
        killed = is_killed_at(point, make_cache, source, cache)
        check_data(source, cache)
        if not killed:
            break
    assert point > 6


def _fill_disk(source: Path, cache: Path) -> tuple[str, list[str]]:
    with pytest.raises(DiskFull) as caught:
        make_cache(source, cache)
    return str(caught.value), [path.name for path in cache.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [16_384, 131_072])
def test_a_full_disk_is_our_error_and_leaves_nothing_behind(tmp_path: Path, size: int) -> None:
    source = write_lines(tmp_path / "a.jsonl", sentences(3000))
    cache = tmp_path / "cache"
    cache.mkdir()
    message, left = on_small_disk(cache, size, _fill_disk, source, cache)
    assert str(cache) in message
    assert left == [".lock"]


# Streams

SPLIT = split_of([number % 251 for number in range(5000)])


def make_stream(seed: int = 1, peer: str = "peer") -> TrainStream:
    return TrainStream(SPLIT, 16, 4, seed, peer)


def draw(stream: TrainStream, count: int) -> list[torch.Tensor]:
    return [torch.stack(stream.next_batch()) for _ in range(count)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_batch_is_a_function_of_seed_peer_and_number() -> None:
    first = draw(make_stream(), 10)
    np.random.default_rng(3).random(5)
    torch.manual_seed(3)
    assert same(draw(make_stream(), 10), first)
    for other in (make_stream(seed=2), make_stream(peer="peer2"), make_stream(seed=-1)):
        assert not any(map(torch.equal, draw(other, 10), first))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(first, 2))


def test_a_stream_resumes_at_the_same_token() -> None:
    stream = make_stream()
    draw(stream, 7)
    state = json.loads(json.dumps(stream.state()))
    rest = draw(stream, 5)
    resumed = make_stream()
    draw(resumed, 3)
    resumed.restore(state)
    assert resumed.batches == 7
    assert same(draw(resumed, 5), rest)
    assert resumed.state() == stream.state()


def test_all_peers_evaluate_on_the_same_windows() -> None:
    """Frozen: peers with other versions of numpy must draw the same ones."""
    tokens, targets = held_out_windows(SPLIT, 16, 64, seed=5)
    assert tokens.shape == (64, 16)
    assert torch.equal(targets, (tokens + 1) % 251)
    assert not torch.equal(held_out_windows(SPLIT, 16, 64, seed=6)[0], tokens)
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("5002bf4811b0b10f")
