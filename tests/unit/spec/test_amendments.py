"""What must hold for amendments: only the creator's, in one order, bounded, and the same settings
at a swarm step everywhere."""

import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm_protocol.errors import (
    LowcommError,
    RecordError,
    SignatureError,
    SpecError,
    VersionError,
)
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.amendments import (
    MAX_AMENDMENTS,
    MAX_STEP,
    Chain,
    SpecTimeline,
    newest,
    read_chain,
    write_amendment,
)
from lowcomm_protocol.spec.document import encode
from lowcomm_protocol.spec.run import parse_toml, sign_run

CREATOR, STRANGER = Identity(b"c" * 32), Identity(b"s" * 32)
RUN = sign_run(parse_toml('[run]\nname = "a"\nsteps = 400\n'), CREATOR)
OTHER = sign_run(parse_toml('[run]\nname = "b"\nsteps = 400\n'), CREATOR)


def amended(*changes: tuple[int, dict[str, Any]]) -> Chain:
    chain = Chain()
    for at, change in changes:
        chain = write_amendment(CREATOR, RUN, chain, at, change)
    return chain


def forged(creator: Identity = CREATOR, **changes: Any) -> bytes:
    """A chain of one amendment as a creator could make it who does not use our program."""
    content = {
        "run": RUN.run_id,
        "number": 1,
        "previous": RUN.run_id,
        "at": 5,
        "settings": {"run.steps": 500},
    } | changes
    document = encode(content)
    told = {"document": document.decode(), "signature": creator.sign("amendment", document).hex()}
    return json.dumps([told]).encode()


LONGER = amended(
    (100, {"run.steps": 1000}), (200, {"train.learning_rate": 0.001, "train.warmup": 0})
)


# What holds when


def test_settings_hold_from_their_swarm_step_on_and_the_rest_stays():
    course = SpecTimeline(RUN.spec, LONGER)
    assert course.at(99) == RUN.spec
    assert course.at(100).run.steps == course.at(199).run.steps == 1000
    assert course.at(199).train == RUN.spec.train
    assert (course.at(200).train.learning_rate, course.at(10**9).train.warmup) == (0.001, 0)
    assert course.at(200).sync == RUN.spec.sync and course.at(200).model == RUN.spec.model


PACKED = """[run]
name = "a"
[data]
source = "packed"
""" + "".join(
    f'[[data.parts]]\nname = "{name}"\npieces = "{digit * 64}"\ntokens = 900_000\n'
    f"held_out_tokens = 9\nshare = {share}\n"
    for name, digit, share in (("web", "a", 1.0), ("books", "b", 0.0))
)


def test_shares_of_packed_text_change_and_nothing_else_of_it() -> None:
    run = sign_run(parse_toml(PACKED), CREATOR)
    chain = write_amendment(CREATOR, run, Chain(), 50, {"data.shares": [0.25, 0.75]})
    timeline = SpecTimeline(run.spec, read_chain(chain.data, run.creator))
    assert [part.share for part in timeline.at(49).data.parts] == [1.0, 0.0]
    changed = timeline.at(50)
    assert [part.share for part in changed.data.parts] == [0.25, 0.75]
    same = [part.model_copy(update={"share": 1.0}) for part in changed.data.parts]
    assert same == [part.model_copy(update={"share": 1.0}) for part in run.spec.data.parts]
    assert str(chain.links[0]) == "amendment 1: data.shares = [0.25, 0.75] from swarm step 50"
    for shares in ([1.0], [0.0, 0.0], [2.0, 0.0], [True, "a"], 0.5, [0.1, float("nan")], []):
        with pytest.raises((SpecError, ValueError)):
            write_amendment(CREATOR, run, chain, 60, {"data.shares": shares})
    with pytest.raises(SpecError, match="the run's 0 packed texts"):
        write_amendment(CREATOR, RUN, Chain(), 5, {"data.shares": []})
    with pytest.raises(SpecError, match=r"data.parts can't be changed"):
        write_amendment(CREATOR, run, chain, 60, {"data.parts": []})


def test_a_context_longer_than_a_piece_is_refused() -> None:
    small = PACKED.replace("share = 1.0", "share = 1.0\npiece_bytes = 16_384")
    with pytest.raises(SpecError, match=r"model.context = 8193 .* 8,192 tokens in a piece of web"):
        parse_toml(small + "[model]\ncontext = 8193\n")


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(300, 500)), max_size=6), st.integers(0, 600)
)
@settings(max_examples=50, deadline=None)
def test_the_settings_of_a_step_do_not_depend_on_when_a_chain_was_heard(changes, step):
    whole = amended(*((at, {"run.steps": steps}) for at, steps in sorted(changes)))
    heard = read_chain(whole.data, CREATOR.peer_id) if whole.links else whole
    known = [link for link in whole.links if link.at <= step]
    early = amended(*((link.at, dict(link.settings)) for link in known))
    assert SpecTimeline(RUN.spec, heard).at(step) == SpecTimeline(RUN.spec, early).at(step)


# What a creator may change


@pytest.mark.parametrize(
    ("at", "change", "told"),
    [
        (
            5,
            {"sync.codec": "fp32"},
            "sync.codec can't be changed while a run trains; these can: run.steps",
        ),
        (5, {}, "needs a setting"),
        (5, {"run.steps": 0}, r"amendment 1: run\.steps = 0"),
        (5, {"run.steps": 4}, r"run\.steps = 4 is before swarm step 5"),
        (5, {"run.steps": "many"}, r"run\.steps = 'many'"),
        (5, {"train.learning_rate": 2.0}, r"train\.learning_rate = 2\.0"),
        (5, {"run.members": [STRANGER.peer_id]}, "members are given, but admission"),
        (5, {"run.admission": "list"}, "needs members"),
        (-1, {"run.steps": 500}, "Swarm step -1 is not one"),
        (
            MAX_STEP + 1,
            {"run.description": "late"},
            r"Swarm step 100000001 is not one: expected 0 to 100000000\.",
        ),
        (5, {"run.description": "\x1b[2J"}, "printable"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(at, change, told):
    with pytest.raises(SpecError, match=told) as caught:
        write_amendment(CREATOR, RUN, Chain(), at, change)
    assert len(str(caught.value)) < 400


def test_a_chain_of_more_amendments_than_there_may_be_is_refused_and_one_of_the_most_is_read():
    most = amended(*((1, {"run.steps": 500 + number}) for number in range(MAX_AMENDMENTS)))
    assert read_chain(most.data, CREATOR.peer_id) == most
    told = json.loads(most.data)
    content = json.loads(told[-1]["document"])
    more = content | {
        "number": MAX_AMENDMENTS + 1,
        "previous": sha256(told[-1]["document"].encode()).hexdigest(),
    }
    document = encode(more)
    told.append(
        {"document": document.decode(), "signature": CREATOR.sign("amendment", document).hex()}
    )
    for count in (0, MAX_AMENDMENTS + 1):
        with pytest.raises(RecordError, match=f"expected 1 to {MAX_AMENDMENTS}, each signed"):
            read_chain(json.dumps(told[:count]).encode(), CREATOR.peer_id)


# What strangers send


def test_a_chain_of_another_run_or_signer_is_refused():
    with pytest.raises(SignatureError):
        read_chain(LONGER.data, STRANGER.peer_id)
    with pytest.raises(SignatureError):
        read_chain(forged(STRANGER), CREATOR.peer_id)
    other = write_amendment(CREATOR, OTHER, Chain(), 1, {"run.steps": 500})
    assert newest(RUN.spec, RUN.run_id, [other.data]).chain == Chain()


def test_links_can_be_neither_left_out_nor_turned_round_nor_taken_from_another_run():
    links = json.loads(LONGER.data)
    foreign = json.loads(write_amendment(CREATOR, OTHER, Chain(), 1, {"run.steps": 500}).data)
    for told in (
        links[1:],
        links[::-1],
        [links[0], links[0]],
        [foreign[0], links[1]],
        [links[0], foreign[0]],
    ):
        with pytest.raises(RecordError, match="no chain"):
            read_chain(json.dumps(told).encode(), CREATOR.peer_id)


def test_of_two_chains_the_longer_holds_and_of_two_alike_all_take_the_same():
    short = Chain(RUN.run_id, LONGER.links[:1])
    assert (
        newest(RUN.spec, RUN.run_id, [amended((100, {"run.steps": 1000})).data, LONGER.data]).chain
        == LONGER
    )
    assert short.order < LONGER.order
    forks = [amended((1, {"run.steps": steps})).data for steps in (500, 600)]
    assert (
        newest(RUN.spec, RUN.run_id, forks).chain == newest(RUN.spec, RUN.run_id, forks[::-1]).chain
    )


def test_a_setting_that_this_release_can_not_change_asks_for_a_newer_one():
    with pytest.raises(
        VersionError, match=r"changes 'sync\.pairing', which this release can't: install"
    ):
        read_chain(forged(settings={"sync.pairing": "random"}), CREATOR.peer_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"at": -1}, {"at": 1.5}, {"at": True}, {"at": 10**30}, {"number": 0}, {"number": True},
        {"number": 2}, {"run": "x" * 64},
        {"previous": ""}, {"settings": {}}, {"settings": []}, {"more": 1}, {"run": ["a"]},
        {"settings": {"run.members": []}},
        {"settings": {"": 1}}, {"settings": {"run.steps": 10, "x" * 500: 1}},
    ],
)  # fmt: skip
def test_an_amendment_out_of_bounds_is_refused_in_few_words(changes):
    with pytest.raises(LowcommError) as caught:
        read_chain(forged(**changes), CREATOR.peer_id)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"run.steps": 4},
        {"run.steps": 1e3},
        {"run.steps": None},
        {"train.warmup": [1]},
        {"run.description": {}},
    ],
)
def test_a_signed_change_into_no_valid_run_is_refused_by_the_course(change):
    chain = read_chain(forged(settings=change), CREATOR.peer_id)
    with pytest.raises(SpecError):
        SpecTimeline(RUN.spec, chain)
    assert newest(RUN.spec, RUN.run_id, [forged(settings=change), LONGER.data]).chain == LONGER


@given(st.integers(0, len(LONGER.data) - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_flipped_byte_is_refused_or_changes_nothing(place, flip):
    data = bytearray(LONGER.data)
    data[place] ^= flip
    try:
        assert read_chain(bytes(data), CREATOR.peer_id) == LONGER
    except LowcommError:
        return
