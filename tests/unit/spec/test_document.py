"""What must hold for signed runs of other releases: no release strands a run that trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowcomm_protocol.errors import LowcommError, SpecError, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.document import ADDED, MAX_OPTIONAL, encode
from lowcomm_protocol.spec.run import (
    check_new_run,
    check_trainable,
    parse_canonical,
    parse_toml,
    read_signed_run,
    run_id_of,
    sign_run,
)
from lowcomm_protocol.spec.sections import AdapterSettings

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(path for path in GOLDEN.glob("*/*.json") if path.name != "expected.json")
CREATOR = Identity(b"c" * 32)
MINIMAL = '[run]\nname = "demo"\n'
SIGNED = sign_run(parse_toml(MINIMAL), CREATOR)


def content_with(**sections: Any) -> dict[str, Any]:
    """The content of the minimal run, with settings that this release does not know."""
    content = json.loads(SIGNED.document)
    for section, values in sections.items():
        content[section] = (
            {**content.get(section, {}), **values} if isinstance(values, dict) else values
        )
    return content


def signed(content: dict[str, Any]) -> bytes:
    """A run that another release has signed."""
    document = encode(content)
    signature = CREATOR.sign("run specification", document).hex()
    return json.dumps(
        {"creator": CREATOR.peer_id, "signature": signature, "spec": document.decode()}
    ).encode()


def paths_of(settings: dict[str, Any]) -> set[str]:
    return {
        f"{section}.{name}" if name else section
        for section, values in settings.items()
        for name in (values if isinstance(values, dict) else [""])
    }


# Runs that releases have signed


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_run_of_every_release_keeps_its_id_its_settings_and_its_bytes(path: Path) -> None:
    expected = json.loads((path.parent / "expected.json").read_text())[path.stem]
    run = read_signed_run(path.read_bytes())
    assert run.run_id == expected["run_id"]
    assert run.to_bytes() == path.read_bytes()
    settings = run.spec.model_dump(mode="json")
    later = {
        name: value for name, value in ADDED.items() if name not in paths_of(expected["settings"])
    }
    for section, values in settings.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            told = f"{section}.{name}" if name else section
            if told in later:
                assert value == json.loads(json.dumps(later[told])), told
            else:
                assert value == (
                    expected["settings"][section][name] if name else expected["settings"][section]
                ), told


def test_every_setting_that_came_later_says_what_older_runs_mean():
    first = paths_of(
        json.loads((GOLDEN / "0.1.0" / "expected.json").read_text())["lowcomm"]["settings"]
    )
    assert paths_of(parse_toml(MINIMAL).model_dump()) == first | set(ADDED)


def test_a_setting_is_signed_only_where_it_says_something_new():
    # The preset of MINIMAL has a memory; a run without one can be read by 0.1.
    assert paths_of(json.loads(SIGNED.document)) & set(ADDED) == {"sync.memory"}
    without = parse_toml(MINIMAL + "[sync]\nmemory = 0.0\n")
    assert not paths_of(json.loads(without.canonical())) & set(ADDED)
    marked = parse_toml('optional = ["sync.codec"]\n' + MINIMAL)
    assert json.loads(marked.canonical())["optional"] == ["sync.codec"]
    assert parse_canonical(marked.canonical().decode()) == marked


# Settings that this release does not know


def test_an_unknown_setting_is_refused_with_the_remedy():
    with pytest.raises(
        VersionError, match=r"does not know the setting 'sync\.foo': install the release that"
    ):
        read_signed_run(signed(content_with(sync={"foo": 1})))
    with pytest.raises(VersionError, match="the setting 'rewards'"):
        read_signed_run(signed(content_with(rewards={"foo": 1})))


@pytest.mark.parametrize("value", [1, "text", None, [1, [2]], {"a": {"b": 1.5}}])
def test_an_unknown_setting_that_the_creator_marked_optional_is_ignored_and_travels_on(value):
    data = signed(
        content_with(optional=["rewards", "sync.foo"], sync={"foo": value}, rewards={"coin": value})
    )
    run = read_signed_run(data)
    assert run.spec.sync == SIGNED.spec.sync
    assert run.to_bytes() == data
    assert run.run_id == run_id_of(json.loads(data)["spec"].encode()) != SIGNED.run_id
    assert parse_canonical(run.document.decode()) == run.spec


@pytest.mark.parametrize(
    "hostile",
    [
        {"optional": ["sync"], "sync": {"foo": 1}},
        {"run.name": "b"},
        {"sync": {"interval.x": 1}},
        {"": 1},
        {"optional": "sync.foo", "sync": {"foo": 1}},
        {"optional": [["sync.foo"]], "sync": {"foo": 1}},
        {"optional": [f"a{number}" for number in range(MAX_OPTIONAL + 1)]},
        {"optional": ["a" * 81], "a" * 81: 1},
        {"optional": ["b", "a"], "a": 1, "b": 1},
        {"optional": ["a", "a"], "a": 1},
        {"model": 1},
    ],
)
def test_nothing_else_gets_past(hostile):
    with pytest.raises(LowcommError) as caught:
        read_signed_run(signed(content_with(**hostile)))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("sync", [{"codec": "q1"}, {"group": 2, "codec": "q2"}])
def test_a_run_of_0_1_that_uses_what_is_gone_is_read_but_neither_trained_nor_created(sync):
    document = json.loads((GOLDEN / "0.1.0" / "streaming-diloco.json").read_text())["spec"]
    content = json.loads(document)
    content["sync"] |= {"error_feedback": True, "min_steps": 1} | sync
    document = encode(content).decode()
    spec = parse_canonical(document)
    assert spec.canonical().decode() == document
    with pytest.raises(VersionError, match="only earlier releases can train with"):
        check_trainable(spec)
    with pytest.raises(SpecError, match="only earlier releases"):
        check_new_run(spec)


def with_adapter(**settings: Any) -> dict[str, Any]:
    file = {"name": "a.safetensors", "size": 1, "sha256": "0" * 64, "pieces": "0" * 64}
    return content_with(start={"files": [file]}, **settings)


def test_a_document_has_an_adapter_whole_or_not_at_all():
    settings = AdapterSettings(rank=4, base="nf4").model_dump(mode="json")
    whole = encode(with_adapter(adapter=settings)).decode()
    spec = parse_canonical(whole)
    assert spec.adapter == AdapterSettings(rank=4, base="nf4")
    assert spec.canonical().decode() == whole
    none = parse_canonical(encode(with_adapter()).decode())
    assert none.adapter is None and b"adapter" not in none.canonical()
    for hostile in (None, 1, {}, settings | {"rank": 0}, settings | {"more": 1}):
        with pytest.raises(LowcommError, match="adapter"):
            parse_canonical(encode(with_adapter(adapter=hostile)).decode())
