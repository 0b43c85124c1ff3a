"""What must hold for error feedback: nothing is lost in the long run, nothing runs away, and only
commit changes anything."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowcomm_protocol.codecs import CODECS, Coder, Residual, codec, coder
from lowcomm_protocol.codecs.feedback import FeedbackCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

PLAIN = ("bf16", "int8", "e3m0", "q2", "q1")
"""Lossy codecs that need no partner."""
LIMIT = 16


def coded(one: Coder, vector: np.ndarray) -> bytes:
    """Encode; ``vector`` becomes what the other end decodes."""
    buffer = memoryview(bytearray(one.max_size))
    return bytes(buffer[: one.encode(vector, buffer)])


def sent(one: Coder, vector: np.ndarray) -> np.ndarray:
    """What arrives of a vector in an exchange that is applied."""
    out = vector.astype(np.float32)
    coded(one, out)
    one.commit()
    return out


def residual_of(one: Coder | Residual) -> np.ndarray:
    return one.state()["residual"]


def gaussian(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_what_was_sent_falls_short_of_what_was_wanted_by_the_residual(name):
    numel = 2 * BLOCK + 44
    one = coder(name, numel, feedback=True)
    wanted, arrived = np.zeros(numel), np.zeros(numel)
    for seed in range(30):
        vector = gaussian(numel, seed) * (1 + seed % 7)
        wanted += vector
        arrived += sent(one, vector)
        assert np.abs(wanted - arrived - residual_of(one)).max() < 1e-4
        assert residual_of(one).any()


@pytest.mark.parametrize("name", PLAIN)
def test_in_the_long_run_the_mean_of_what_was_sent_is_the_mean_of_what_was_wanted(name):
    numel, count = 4 * BLOCK, 1500
    mean = gaussian(numel)
    errors = {}
    for feedback in (False, True):
        one, total = coder(name, numel, feedback), np.zeros(numel)
        for seed in range(count):
            vector = mean + 3 * gaussian(numel, seed + 1)
            total += sent(one, vector) - vector.astype(np.float64)
        errors[feedback] = np.sqrt(np.mean((total / count) ** 2))
    # the residual is at most a few times one exchange's error, and that is shared by all exchanges
    assert errors[True] < 0.01
    assert errors[True] < 0.05 * errors[False]


@pytest.mark.parametrize("name", ["q2", "e3m0"])
def test_a_value_that_never_changes_arrives_though_each_exchange_rounds_it_the_same_way(name):
    values = np.full(BLOCK, 0.01, dtype=np.float32)
    values[7] = 1.0
    one = coder(name, BLOCK, feedback=True)
    total = sum(sent(one, values).astype(np.float64) for _ in range(2000))
    assert np.abs(total / 2000 - values).max() < 0.01


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_owed_is_paid_off_when_nothing_new_comes(name):
    one = coder(name, BLOCK, feedback=True)
    vector = gaussian(BLOCK)
    total = sent(one, vector).astype(np.float64)
    for _ in range(1500):  # q1 is slow: a single value pays 1 / 256 of what it owes
        total += sent(one, np.zeros(BLOCK))
    assert np.abs(residual_of(one)).max() < 0.01
    assert np.abs(total - vector).max() < 0.01


@pytest.mark.parametrize("name", CODECS)
def test_an_exchange_that_is_not_applied_changes_nothing(name):
    numel = BLOCK + 3
    one, again = (coder(name, numel, feedback=True) for _ in range(2))
    sent(one, gaussian(numel)), sent(again, gaussian(numel))
    for give_up in (True, False):
        coded(one, 100 * gaussian(numel, 1))
        if give_up:  # and without forget the next encode starts over
            one.forget()
    one.forget()
    one.commit() if name not in ("mod3", "mod4", "mod6", "mod8") else None
    assert {name: values.tobytes() for name, values in one.state().items()} == {
        name: values.tobytes() for name, values in again.state().items()
    }
    assert coded(one, gaussian(numel, 2)) == coded(again, gaussian(numel, 2))


@pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
def test_what_is_remembered_survives(name):
    numel = BLOCK + 3
    one, again = (coder(name, numel, feedback=True) for _ in range(2))
    for seed in range(3):
        sent(one, gaussian(numel, seed))
    state = one.state()
    coded(again, gaussian(numel, 8))
    again.restore(state)
    for seed in range(3, 6):
        first, second = gaussian(numel, seed), gaussian(numel, seed)
        assert coded(one, first) == coded(again, second)
        assert first.tobytes() == second.tobytes()
        one.commit(), again.commit()
    assert state["residual"].tobytes() != residual_of(one).tobytes(), "a state is a copy"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -(2.0**127)])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(bad):
    one = coder("mod4", 3, feedback=True)
    ranges = np.ones(1, dtype=np.float32)
    one.restore({"range": ranges, "residual": np.float32([1, 2, 3])})
    for residual in ([1, bad, 3], [1, 2], [[1, 2, 3]]):
        with pytest.raises(CodecError, match="residual of 3 values, finite"):
            one.restore({"range": ranges * 2, "residual": np.array(residual, dtype=np.float32)})
    with pytest.raises(CodecError, match="residual of 3 values"):
        one.restore({"range": ranges * 2})
    with pytest.raises(CodecError, match="1 finite ranges"):
        one.restore({"residual": np.zeros(3, dtype=np.float32)})
    assert one.state()["range"] == 1 and list(residual_of(one)) == [1, 2, 3]
    with pytest.raises(CodecError, match="remembers nothing"):
        coder("q1", 3, feedback=True).restore(
            {"range": ranges, "residual": np.zeros(3, dtype=np.float32)}
        )


def test_feedback_wraps_every_codec_but_fp32():
    assert type(coder("fp32", 5, feedback=True)) is Coder
    for name in CODECS:
        plain, wrapped = coder(name, 300), coder(name, 300, feedback=True)
        assert isinstance(wrapped, FeedbackCoder) == (name != "fp32")
        assert not isinstance(plain, FeedbackCoder)
        assert (wrapped.min_size, wrapped.max_size, wrapped.numel) == (
            plain.min_size,
            plain.max_size,
            300,
        )


@pytest.mark.parametrize("numel", [BLOCK, 3 * BLOCK + 40])
@pytest.mark.parametrize("name", CODECS)
def test_the_steps_of_its_lattice_are_those_of_what_it_wraps_one_a_block(name, numel):
    blocks = -(-numel // BLOCK)
    for feedback in (False, True):
        one, two = (coder(name, numel, feedback) for _ in range(2))
        steps = []
        for seed in range(2):
            a, b = near(numel, seed)
            held = np.zeros_like(a)
            coded(two, b)
            two.decode(memoryview(coded(one, a)), held)
            one.decode(memoryview(coded(two, b.copy())), np.zeros_like(a))
            steps.append(two.lattice_steps)
            one.commit(), two.commit()
        assert all(one.dtype == np.float32 and one.shape == (blocks,) for one in steps)
        assert not steps[0].any(), "no lattice, or none yet"
        assert steps[1].any() == name.startswith("mod")


def near(numel: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    base = 0.05 * gaussian(numel, 100 + seed)
    return base + 1e-3 * gaussian(numel, 200 + seed), base + 1e-3 * gaussian(numel, 300 + seed)


def test_blocks_that_a_modulo_codec_sends_again_leave_the_error_of_what_came_in_the_end():
    numel = 3 * BLOCK
    one, two = (coder("mod4", numel, feedback=True) for _ in range(2))
    for seed in range(3):
        a, b = near(numel, seed)
        if seed == 2:
            a[5] += 2000.0  # wraps, by so many steps that it comes again as bf16
        wanted = a + residual_of(one)
        own, held = a.copy(), np.zeros_like(a)
        data = coded(one, own)
        coded(two, b)
        asked = two.decode(memoryview(data), held)
        one.decode(memoryview(coded(two, b.copy())), np.zeros_like(a))
        assert bool(asked) == (seed == 2)
        if asked:
            buffer = memoryview(bytearray(one.max_size))
            size = one.resend(asked, own, buffer)
            least, most = two.resent_sizes(asked)
            assert least <= size <= most
            two.patch(buffer[:size], held)
        assert own.tobytes() == held.tobytes()
        one.commit(), two.commit()
        assert np.array_equal(residual_of(one), wanted - held)
    short = wanted.copy()
    coded(coder("bf16", numel), short)
    came_again = residual_of(one) == wanted - short
    assert came_again[:BLOCK].all() and not came_again[BLOCK:].all()


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", ["lone", "gaussian", "student"])
def test_a_residual_stays_within_a_few_times_the_largest_value_of_its_block(name, shape):
    values = {
        "lone": np.eye(1, BLOCK)[0],
        "gaussian": gaussian(BLOCK),
        "student": np.random.default_rng(0).standard_t(3, BLOCK),
    }[shape].astype(np.float32)
    one, worst = coder(name, BLOCK, feedback=True), 0.0
    for _ in range(400):
        assert np.isfinite(sent(one, values)).all()
        worst = max(worst, np.abs(residual_of(one)).max() / np.abs(values).max())
    expected = {"bf16": 0.01, "int8": 0.01, "e3m0": 0.5, "q2": LIMIT, "q1": LIMIT * 1.001}[name]
    assert worst <= expected
    assert name != "q1" or worst > 8, "or else the limit is not seen here"


def test_the_limit_is_that_of_each_block_and_what_is_owed_already_is_not_cut():
    residual = Residual(BLOCK + 10)
    wanted, nothing = np.zeros(BLOCK + 10, dtype=np.float32), np.zeros(BLOCK + 10, dtype=np.float32)
    wanted[:3], wanted[BLOCK:] = [1.0, -2.0, 0.5], 0.25
    sent_far = wanted - np.float32(100)

    def exchange(values: np.ndarray, arrived: np.ndarray) -> None:
        residual.keep(values, arrived, 0, BLOCK + 10)
        residual.commit([(0, BLOCK + 10)])

    exchange(wanted, sent_far)
    assert (residual_of(residual)[:BLOCK] == LIMIT * 2.0).all()
    assert (residual_of(residual)[BLOCK:] == LIMIT * 0.25).all()
    again = np.zeros_like(wanted)
    residual.add(again, 0, BLOCK + 10)
    exchange(again, nothing)
    assert (residual_of(residual)[:BLOCK] == LIMIT * 2.0).all(), (
        "values became zeros: nothing was sent, all is owed"
    )
    exchange(again, -again)
    assert (residual_of(residual)[:BLOCK] == LIMIT * 2.0).all(), "and it grows no further"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["wanted", "sent"])
def test_an_error_that_is_not_finite_becomes_zero(bad, which):
    wanted, arrived = gaussian(300), gaussian(300, 1)
    {"wanted": wanted, "sent": arrived}[which][[3, 299]] = bad
    residual = Residual(300)
    residual.keep(wanted, arrived, 0, 300)
    residual.commit([(0, 300)])
    assert np.isfinite(residual_of(residual)).all()
    assert not residual_of(residual)[[3, 299]].any()
    assert residual_of(residual)[4] == wanted[4] - arrived[4]


large = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=60)
@given(
    st.sampled_from(PLAIN),
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 300)), elements=large),
)
@example("q1", np.tile(np.float32([2.0**127, -(2.0**127), 0.0, 2.0**127]), (40, 1)))
@example("bf16", np.tile(np.float32([2.0**127, -(2.0**127), 2.0**126.99]), (40, 1)))
def test_what_can_be_coded_without_feedback_can_be_coded_with_it_and_the_residual_stays_in_bounds(
    name, vectors
):
    one = coder(name, vectors.shape[1], feedback=True)
    largest = np.zeros(vectors.shape[1])
    for vector in vectors:
        assert np.isfinite(sent(one, vector)).all()
        for start in range(0, vector.size, BLOCK):
            block = slice(start, start + BLOCK)
            largest[block] = np.maximum(
                largest[block], np.abs(vector[block].astype(np.float64)).max()
            )
        # the values are found again as wanted - residual, which rounds
        assert (
            np.abs(residual_of(one)) <= np.minimum(LIMIT * largest * 1.001 + 1e-26, 2.0**126)
        ).all()


def test_where_the_sum_would_be_too_large_to_code_a_value_goes_without_its_residual():
    one = coder("bf16", 3, feedback=True)
    one.restore({"residual": np.float32([2.0**126, 2.0**126, -(2.0**126)])})
    vector = np.float32([2.0**127, 1.0, 2.0**127])
    coded(one, vector)
    assert list(vector) == [2.0**127, 2.0**126, 2.0**126]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_refused_and_leaves_the_residual(name, bad):
    one, again = (coder(name, 300, feedback=True) for _ in range(2))
    sent(one, gaussian(300)), sent(again, gaussian(300))
    vector = gaussian(300, 1)
    vector[299] = bad
    coded(one, gaussian(300, 2))
    with pytest.raises(CodecError, match=f"value 299 of 300 is {bad}"):
        coded(one, vector)
    one.commit()  # of nothing: what was encoded before is not what is in the vector any more
    assert residual_of(one).tobytes() == residual_of(again).tobytes()


def test_what_was_sent_is_read_when_the_exchange_is_applied():
    one, vector = coder("e3m0", BLOCK, feedback=True), gaussian(BLOCK)
    wanted = vector.copy()
    coded(one, vector)
    vector[3] = wanted[3] - 0.5
    one.commit()
    assert residual_of(one)[3] == 0.5
    vector[:] = 0
    one.commit()
    assert residual_of(one)[3] == 0.5, "an exchange is applied once"


# a vector in ranges


def kept(residual: Residual, start: int, stop: int, seed: int = 0) -> np.ndarray:
    """Make an error of this range wait; the error."""
    wanted = gaussian(stop - start, seed)
    residual.add(wanted, start, stop)
    arrived = gaussian(stop - start, seed + 50)
    residual.keep(wanted, arrived, start, stop)
    error = wanted - arrived
    wanted[:] = arrived[:] = 9.0  # what waits is no view of these
    return error


def test_ranges_that_were_applied_take_their_error_and_the_others_keep_their_residual():
    residual = Residual(700)
    first = kept(residual, 0, 700)
    residual.commit([(0, 700)])
    errors = {one: kept(residual, *one, seed=one[0]) for one in ((0, 300), (300, 301), (301, 700))}
    residual.commit([(301, 700), (0, 300)])
    expected = first.copy()
    expected[:300], expected[301:] = errors[0, 300], errors[301, 700]
    assert residual_of(residual).tobytes() == expected.tobytes()
    with pytest.raises(CodecError, match=r"nothing waits for the range \(300, 301\)"):
        residual.commit([(300, 301)])


def test_a_range_adds_its_own_part_of_the_residual_in_place():
    residual = Residual(10)
    residual.restore({"residual": np.arange(10, dtype=np.float32)})
    vector = np.full(10, np.float32(100))
    residual.add(vector[4:7], 4, 7)
    assert list(vector) == [100] * 4 + [104, 105, 106] + [100] * 3
    assert list(residual_of(residual)) == list(range(10))


def test_nothing_changes_before_commit_nor_after_forget():
    residual = Residual(10)
    kept(residual, 2, 5)
    assert not residual_of(residual).any()
    residual.forget()
    with pytest.raises(CodecError, match="nothing waits"):
        residual.commit([(2, 5)])
    kept(residual, 2, 5)
    residual.restore({"residual": np.zeros(10, dtype=np.float32)})
    with pytest.raises(CodecError, match="nothing waits"):
        residual.commit([(2, 5)])


def test_a_range_that_was_not_kept_is_refused_and_none_is_committed():
    residual = Residual(10)
    error = kept(residual, 2, 5)
    for other in ((2, 4), (5, 8), (0, 10)):
        with pytest.raises(CodecError, match="nothing waits"):
            residual.commit([(2, 5), other])
        assert not residual_of(residual).any()
    residual.commit([(2, 5)])
    assert np.array_equal(residual_of(residual)[2:5], error)


def test_a_range_kept_again_replaces_what_waited_and_one_that_overlaps_is_refused():
    residual = Residual(10)
    kept(residual, 2, 5)
    error = kept(residual, 2, 5, seed=1)
    for start, stop in ((2, 4), (4, 6), (0, 3), (0, 10), (3, 4)):
        with pytest.raises(CodecError, match=r"overlaps \(2, 5\)"):
            kept(residual, start, stop)
    kept(residual, 5, 10), kept(residual, 0, 2)
    residual.commit([(2, 5)])
    assert np.array_equal(residual_of(residual)[2:5], error)
    assert not residual_of(residual)[5:].any() and not residual_of(residual)[:2].any()


def test_ranges_and_vectors_that_do_not_fit_are_refused():
    residual, three = Residual(10), np.ones(3, dtype=np.float32)
    for start, stop in ((-1, 2), (8, 11), (5, 2)):
        with pytest.raises(CodecError, match="does not lie within 10 values"):
            residual.add(three, start, stop)
        with pytest.raises(CodecError, match="does not lie within 10 values"):
            residual.keep(three, three, start, stop)
    for bad in (
        np.ones(2, np.float32),
        np.ones(3),
        np.ones((1, 3), np.float32),
        np.ones(6, np.float32)[::2],
    ):
        for call in (
            lambda bad=bad: residual.add(bad, 0, 3),
            lambda bad=bad: residual.keep(bad, three, 0, 3),
            lambda bad=bad: residual.keep(three, bad, 0, 3),
        ):
            with pytest.raises(CodecError, match="pass 3 values"):
                call()
    three.flags.writeable = False
    residual.keep(three, three, 0, 3)
    with pytest.raises(CodecError, match="read-only"):
        residual.add(three, 0, 3)
    with pytest.raises(CodecError, match="pass 4 values"):
        coded(coder("q1", 4, feedback=True), np.ones(3, dtype=np.float32))


def test_a_vector_coded_range_by_range_loses_what_the_whole_does_if_its_blocks_are_the_same():
    residual, whole = Residual(3 * BLOCK), coder("q2", 3 * BLOCK, feedback=True)
    parts = [coder("q2", stop - start) for start, stop in ((0, BLOCK), (BLOCK, 3 * BLOCK))]
    for seed in range(4):
        sent(whole, gaussian(3 * BLOCK, seed))
        at = 0
        for part in parts:
            vector = gaussian(3 * BLOCK, seed)[at : at + part.numel].copy()
            residual.add(vector, at, at + part.numel)
            wanted = vector.copy()
            coded(part, vector)
            residual.keep(wanted, vector, at, at + part.numel)
            at += part.numel
        residual.commit([(0, BLOCK), (BLOCK, 3 * BLOCK)])
        assert residual_of(residual).tobytes() == residual_of(whole).tobytes()


def test_a_late_peer_inherits_ranges_and_no_debts():
    donor, vector = coder("mod4", 600, feedback=True), np.linspace(-1, 1, 600, dtype=np.float32)
    out = memoryview(bytearray(donor.max_size))
    for _ in range(2):
        own = vector.copy()
        data = out[: donor.encode(own, out)]
        donor.decode(data, np.zeros(600, dtype=np.float32))
        donor.commit()
    late = coder("mod4", 600, feedback=True)
    late.inherit(donor.lessons())
    assert donor.state()["residual"].any()
    assert not late.state()["residual"].any()
    assert np.array_equal(late.state()["range"], donor.state()["range"])


@pytest.mark.parametrize("name", ["bf16", "int8", "e3m0", "q2", "q1"])
@given(
    numel=st.sampled_from([0, 1, 9, 255, 256, 257, 600]),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1.0, 1e-30, 1e30, 1.5e38]),
)
def test_one_pass_codes_owes_and_restores_as_four_do(name, numel, seed, size):
    draw = np.random.default_rng(seed)
    given, owed = (draw.standard_t(2, (2, numel)) * size).clip(-1.6e38, 1.6e38).astype(np.float32)
    owed = (owed * np.float32(0.5)).clip(-(2.0**126), 2.0**126)
    one, two = Residual(numel + 3), Residual(numel + 3)
    for each in (one, two):
        each.restore({"residual": np.concatenate([np.zeros(3, np.float32), owed])})
    chosen, sent, wanted = codec(name), given.copy(), given.copy()
    data, expected = (bytearray(chosen.coded_size(numel)) for _ in range(2))
    scratch = np.full(numel, np.nan, np.float32)
    one.send(chosen, sent, 3, memoryview(data), scratch)
    two.add(wanted, 3, numel + 3)
    decoded = wanted.copy()
    chosen.encode(decoded, memoryview(expected))
    chosen.decode(expected, decoded)
    two.keep(wanted, decoded, 3, numel + 3)
    assert data == expected
    assert sent.tobytes() == decoded.tobytes()
    for each in (one, two):
        each.commit([(3, numel + 3)])
    assert one.state()["residual"].tobytes() == two.state()["residual"].tobytes()


@pytest.mark.parametrize("name", ["int8", "e3m0", "q2", "q1"])
@pytest.mark.parametrize("place", [0, 256, 599])
def test_one_pass_refuses_what_is_not_finite_and_names_its_place(name, place):
    vector = np.ones(600, dtype=np.float32)
    vector[place] = np.inf
    with pytest.raises(CodecError, match=rf"value {place} of 600 is inf"):
        Residual(600).send(
            codec(name), vector, 0, memoryview(bytearray(codec(name).coded_size(600)))
        )
