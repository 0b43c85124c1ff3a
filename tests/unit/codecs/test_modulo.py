"""What must hold for modulo codecs: both ends hold the same values for any input, few bits travel,
and lies are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowcomm_protocol.codecs import Coder, coder
from lowcomm_protocol.codecs.modulo import MARGIN, YOUNG, ModuloCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

BITS = {"mod3": 3, "mod4": 4, "mod6": 6, "mod8": 8}
NAMES = sorted(BITS)


class Sent:
    """What one end has sent to the other, and what that made of it."""

    def __init__(self, size: int, asked: bytes, resent: int, decoded: np.ndarray) -> None:
        self.bytes, self.asked, self.decoded = size + len(asked) + resent, asked, decoded
        self.resent = resent
        self.wrapped = sum(byte.bit_count() for byte in asked)


def coded(one: Coder, vector: np.ndarray) -> memoryview:
    """Encode; ``vector`` becomes what the other end decodes."""
    buffer = memoryview(bytearray(one.max_size))
    return buffer[: one.encode(vector, buffer)]


def meet(
    a: np.ndarray, b: np.ndarray, coder_a: Coder, coder_b: Coder, apply: bool = True
) -> tuple[Sent, Sent]:
    """One exchange of a pair, resends included. Asserts that both ends hold the same."""
    own_a, own_b = a.copy(), b.copy()
    data_a, data_b = coded(coder_a, own_a), coded(coder_b, own_b)
    at_b, at_a = np.zeros_like(a), np.zeros_like(b)
    asked_of_a, asked_of_b = coder_b.decode(data_a, at_b), coder_a.decode(data_b, at_a)
    sent = []
    for asked, sender, receiver, own, held, data in (
        (asked_of_a, coder_a, coder_b, own_a, at_b, data_a),
        (asked_of_b, coder_b, coder_a, own_b, at_a, data_b),
    ):
        resent = 0
        if asked:
            buffer = memoryview(bytearray(sender.max_size))
            resent = sender.resend(asked, own, buffer)
            least, most = receiver.resent_sizes(asked)
            assert least <= resent <= most <= receiver.max_size
            receiver.patch(buffer[:resent], held)
        assert own.tobytes() == held.tobytes(), "the ends hold different values"
        sent.append(Sent(len(data), asked, resent, own))
    for one in (coder_a, coder_b):
        one.commit() if apply else one.forget()
    return sent[0], sent[1]


def near(numel: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two peers' vectors, apart by ``spread``."""
    generator = np.random.default_rng(seed)
    base = 0.05 * generator.standard_normal(numel)
    return tuple(
        (base + spread * generator.standard_normal(numel)).astype(np.float32) for _ in range(2)
    )


def pair(name: str, numel: int) -> tuple[ModuloCoder, ModuloCoder]:
    one, two = coder(name, numel), coder(name, numel)
    assert isinstance(one, ModuloCoder) and isinstance(two, ModuloCoder)
    return one, two


finite = st.floats(-(2.0**127), 2.0**127, width=32)
small = st.floats(-1.0, 1.0, width=32)


@st.composite
def meetings(draw):
    """A few exchanges of one pair: anything, and vectors that are close, as a swarm's are."""
    numel = draw(st.integers(1, 700))
    count = draw(st.integers(1, 4))
    vectors = []
    for _ in range(count):
        a = draw(hnp.arrays(np.float32, numel, elements=draw(st.sampled_from([finite, small]))))
        if draw(st.booleans()):
            b = draw(hnp.arrays(np.float32, numel, elements=finite))
        else:
            with np.errstate(over="ignore"):
                b = a + draw(hnp.arrays(np.float32, numel, elements=small)) * np.float32(
                    draw(small)
                )
        vectors.append((a, np.nan_to_num(b, posinf=1.0, neginf=-1.0)))
    return numel, vectors


@pytest.mark.slow
@settings(max_examples=100)
@given(st.sampled_from(NAMES), meetings())
def test_both_ends_hold_the_same_bits_for_any_input(name, meeting):
    numel, vectors = meeting
    coders = pair(name, numel)
    for a, b in vectors:
        meet(a, b, *coders)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_exchange_is_bf16_where_nothing_is_told_and_the_next_has_few_bits(name):
    numel, bits = 100 * BLOCK, BITS[name]
    coders = pair(name, numel)
    first, _ = meet(*near(numel, 1e-3), *coders)
    assert first.bytes == 2 * numel + 4 * 100 + 8
    for seed in range(1, 6):
        sent, _ = meet(*near(numel, 1e-3, seed), *coders)
        assert sent.wrapped <= 3
        assert sent.bytes <= numel * bits / 8 + 4 * 100 + 8 + sent.wrapped * (2 * BLOCK + 30)


def trained(numel: int, seed: int, steps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights that two peers have in common, and what both make of them in so many steps."""
    generator = np.random.default_rng(seed)
    base, one, two = generator.standard_normal((3, numel)).astype(np.float32)
    return base, base + steps * one / 1000, base + steps * two / 1000


@pytest.mark.parametrize("name", NAMES)
def test_peers_that_tell_how_far_they_have_moved_need_no_bf16_from_the_first_exchange_on(name):
    """The learning rate warms up: the second time they have moved twenty times as far."""
    numel = 100 * BLOCK
    coders = pair(name, numel)
    for seed, steps in enumerate((1.0, 20.0, 30.0, 40.0, 40.0)):
        base, *both = trained(numel, seed, steps)
        for one, own in zip(coders, both, strict=True):
            one.expect(base, own, 1.0)
        sent, _ = meet(*both, *coders)
        assert sent.bytes <= numel * BITS[name] / 8 + 4 * 100 + 8 + sent.wrapped * 545
        assert sent.wrapped <= 3, seed


def test_what_a_peer_has_moved_counts_until_the_exchange_is_over_and_only_in_the_first_few():
    one, two = pair("mod4", 4 * BLOCK)
    base, a, b = trained(4 * BLOCK, 0, 1.0)
    for end in (one.commit, one.forget):
        one.expect(base, a, 1.0)
        assert len(coded(one, a.copy())) == one.min_size
        end()
        assert len(coded(one, a.copy())) == one.max_size, "nothing is known any more"
        one.forget()
    for _ in range(YOUNG):
        meet(a, b, one, two)
    before = bytes(coded(one, a.copy()))
    one.expect(base, base + 1.0, 1.0)
    assert bytes(coded(one, a.copy())) == before
    late = coder("mod4", 4 * BLOCK)
    late.restore(one.state())
    late.expect(base, base + 1.0, 1.0)
    assert bytes(coded(late, a.copy())) == before, "ranges that others have learned are not young"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_again_while_peers_stay_near_whatever_the_length_of_the_last_block(name):
    for length in (BLOCK + 100, 3 * BLOCK + 1, 4 * BLOCK):
        random, ends = np.random.default_rng(length), (coder(name, length), coder(name, length))
        for _ in range(4):
            a = random.normal(0, 0.1, length).astype(np.float32)
            apart = random.uniform(-1e-3, 1e-3, length).astype(np.float32)
            assert not any(sent.asked for sent in meet(a, a + apart, *ends))


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_half_a_step_at_most(name):
    numel = 20 * BLOCK
    coders = pair(name, numel)
    meet(*near(numel, 1e-3), *coders)
    ranges = coders[0].state()["range"].repeat(BLOCK)
    a, b = near(numel, 1e-3, 1)
    sent, _ = meet(a, b, *coders)
    step = (
        2 * MARGIN * ranges / 2 ** BITS[name] * 2**0.25
    )  # codes of steps are a quarter of an octave apart
    assert not sent.wrapped
    assert (np.abs(sent.decoded - a) <= step / 2 * 1.001).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_wrapped_anywhere_by_any_number_of_windows_is_seen(name):
    one, two = pair(name, BLOCK)
    for each in (one, two):
        each.restore({"range": np.array([1e-3], dtype=np.float32)})
    a = near(BLOCK, 1e-3)[0]
    data = coded(one, a.copy())
    coded(two, a.copy())
    two.decode(data, np.empty_like(a))
    window = float(two.lattice_steps[0]) * 2**one.bits
    for place in range(BLOCK):
        for others in ([], [place ^ 1], [place ^ 2], [BLOCK - 1 - place]):
            for windows in (1, -1, 3):
                b = a.copy()
                b[place] += np.float32(windows * window)
                b[others] -= np.float32(windows * window)
                coded(two, b)
                assert two.decode(data, np.empty_like(a)) == b"\x80"


@pytest.mark.parametrize("name", NAMES)
def test_a_block_whose_peers_have_drifted_apart_is_found_and_comes_again(name):
    numel = 10 * BLOCK
    coders = pair(name, numel)
    for seed in range(2):
        meet(*near(numel, 1e-3, seed), *coders)
    a, b = near(numel, 1e-3, 2)
    a[3 * BLOCK + 5] += 0.02
    sent, received = meet(a, b, *coders)
    assert sent.asked == received.asked == bytes([0b00010000, 0])
    bits, width = (
        BITS[name],
        float(np.abs(a[3 * BLOCK : 4 * BLOCK]).max() / coders[1].lattice_steps[3]),
    )
    digits = -(-(int(width).bit_length() + 1) // bits) - 1
    by_digits = 1 + digits * BLOCK * bits // 8
    assert sent.resent == min(by_digits, 1 + 2 * BLOCK) + 8
    error = np.abs(sent.decoded - a)[3 * BLOCK : 4 * BLOCK].max()
    assert error <= 0.501 * coders[1].lattice_steps[3], "no coarser than what did not wrap"
    ranges = coders[0].state()["range"]
    assert ranges.argmax() == 3
    assert ranges[3] == pytest.approx(0.02, rel=0.2), "the next step covers it"
    a[3 * BLOCK + 5] -= 0.001
    sent, _ = meet(a, b, *coders)
    assert not sent.asked


def test_what_is_remembered_survives():
    one, two = pair("mod4", 3 * BLOCK)
    meet(*near(3 * BLOCK, 1e-3), one, two)
    again = coder("mod4", 3 * BLOCK)
    again.restore(one.state())
    a = near(3 * BLOCK, 1e-3, 1)[0]
    assert bytes(coded(again, a.copy())) == bytes(coded(one, a.copy()))
    with pytest.raises(CodecError, match="3 finite ranges"):
        again.restore({"range": np.full(3, np.nan, dtype=np.float32)})
    with pytest.raises(CodecError, match="3 finite ranges"):
        again.restore({"range": np.ones(2, dtype=np.float32)})
    with pytest.raises(CodecError, match="remembers nothing"):
        coder("fp32", 2).restore({"range": np.ones(1, dtype=np.float32)})


def test_layout():
    one = coder("mod4", 3)
    one.restore(
        {"range": np.array([1.0], dtype=np.float32)}
    )  # a step of 4 / 16 = 2**-2: code 1 + 4 * 38
    data = bytes(coded(one, np.array([10.0, -0.25, 0.375], dtype=np.float32)))
    assert data[0] == 1 + 4 * 38
    rows = bytes([(40 % 16) | 15 << 4, 2, 0, 0])
    assert data[4:8] == rows, "k = 40, -1, 2, and five rows more; two rows a byte, the first low"
    assert len(data) == 4 + 4 + 8
    raw = bytes(coded(coder("mod4", 3), np.array([1.0, -2.0, 0.0], dtype=np.float32)))
    assert raw[:10] == bytes.fromhex("00000000 803f 00c0 0000")


def hostile(data: bytes):
    """Data that no encoder writes, from data of a coder of 300 values at 3 bits."""
    yield data[:-1], "cut"
    yield data + b"\0", "too long"
    yield b"", "empty"
    yield bytes(8), "only a check"
    yield b"\0" + data[1:], "a block that claims to be bf16"
    yield data[:-9] + bytes([data[-9] | 0x80]) + data[-8:], "padding that is not zero"
    yield data[:1] + b"\0" + data[2:-1] + b"\0\0", "a byte too many"


def test_data_that_no_encoder_writes_is_refused_before_anything_is_decoded():
    one, two = pair("mod3", 300)
    meet(*near(300, 1e-3), one, two)
    a, b = near(300, 1e-3, 1)
    data = bytes(coded(one, a))
    coded(two, b)
    out = np.full(300, 7.0, dtype=np.float32)
    for bad, why in hostile(data):
        with pytest.raises(CodecError, match="no fragment of 300 values"):
            two.decode(memoryview(bad), out)
        assert (out == 7.0).all(), why


def test_requests_for_blocks_that_do_not_exist_are_refused():
    one = coder("mod4", 9 * BLOCK + 1)
    vector = near(9 * BLOCK + 1, 1e-3)[0]
    coded(one, vector)
    buffer = memoryview(bytearray(one.max_size))
    for blocks in (b"", b"\xff", b"\xff" * 3, bytes([0, 0b00100000])):
        with pytest.raises(CodecError, match="bitmap"):
            one.resend(blocks, vector, buffer)
    assert one.resend(bytes([0, 0b01000000]), vector, buffer) == 1 + 2 * 1 + 8, (
        "the last block has one value"
    )
    assert one.resend(b"\xff\xc0", vector, buffer) == 10 + 2 * (9 * BLOCK + 1) + 8


def test_an_answer_that_is_not_what_was_asked_for_is_refused():
    one, two = pair("mod4", 2 * BLOCK)
    for seed in range(2):
        meet(*near(2 * BLOCK, 1e-3, seed), one, two)
    a, b = near(2 * BLOCK, 1e-3, 2)
    a[0] += 0.05
    held, own = np.zeros_like(a), a.copy()
    data = coded(one, own)
    coded(two, b)
    asked = two.decode(data, held)
    assert asked == b"\x80"
    buffer = memoryview(bytearray(one.max_size))
    answer = bytes(buffer[: one.resend(asked, own, buffer)])
    assert answer[0] == 1, "one digit more holds it"
    signs = bytes(15 * (byte >> 3 & 1) + 240 * (byte >> 7) for byte in answer[1:129])
    for bad, why in (
        (b"", "not what was asked for"),
        (answer[:-1], "not what was asked for"),
        (answer + b"\0", "not what was asked for"),
        (b"\0\x80\x7f" + bytes(510) + answer[-8:], "not what was asked for"),  # infinity as bf16
        (b"\x02" + answer[1:129] + signs + answer[129:], "asked for"),  # a digit of signs alone
        (b"\x04" + answer[1:129] + bytes(384) + answer[129:], "asked for"),  # bf16 is no longer
        (b"\xff" + answer[1:], "not what was asked for"),
        (answer[:-1] + bytes([answer[-1] ^ 1]), "does not match its check"),
        (answer[:1] + bytes([answer[1] ^ 1]) + answer[2:], "does not match its check"),
    ):
        assert two.decode(data, held) == asked
        with pytest.raises(CodecError, match=why):
            two.patch(memoryview(bad), held)
    assert two.decode(data, held) == asked
    two.patch(memoryview(answer), held)
    assert own.tobytes() == held.tobytes()


def test_errors_that_the_hashes_of_blocks_do_not_see_are_seen_by_the_check_over_all():
    one, two = pair("mod4", 2 * BLOCK)
    meet(*near(2 * BLOCK, 1e-3), one, two)
    a, b = near(2 * BLOCK, 1e-3, 1)
    own, held = a.copy(), np.zeros_like(a)
    data = bytearray(coded(one, own))
    data[-1] ^= 1
    coded(two, b)
    asked = two.decode(memoryview(bytes(data)), held)
    assert asked == b"\xc0", "everything comes again"
    buffer = memoryview(bytearray(one.max_size))
    two.patch(buffer[: one.resend(asked, own, buffer)], held)
    assert own.tobytes() == held.tobytes()
