"""Kernels for a GPU give the bits of those for host memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lowcomm_protocol.codecs import codec
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.codecs.modulo_kernels import HEADER, modulo_check
from lowcomm_protocol.errors import CodecError, PlanError
from lowcomm_protocol.exchange import outer as on_host
from lowcomm_protocol.spec.outer_settings import OuterSettings

pytestmark = pytest.mark.gpu(interpreted=True)

NUMELS = (1, 7, 255, 256, 257, 1024, 5000)
BLOCK_CODECS = ("int8", "e3m0", "q2")
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-100, -(2.0**-99), 1e-6, 3e38, -3e38, 1.0)
SETTINGS = [
    OuterSettings("nesterov", 0.7, 0.9, 0.0, "shift", 0.0),
    OuterSettings("nesterov", 0.7, 0.9, 0.3, "shift", 0.0),
    OuterSettings("noloco", 0.7, 0.5, 0.2, "mix", 0.3),
    OuterSettings("noloco", 0.7, 0.5, 0.2, "mix", 0.75),
    OuterSettings("noloco", 1.0, 0.5, 1.0, "shift", 0.0, 0.9),
]


def drawn(numel: int, seed: int, scale: float = 0.02) -> Tensor:
    """Values of all sizes: a few are special, and blocks differ in size."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(numel).astype(np.float32) * np.float32(scale)
    blocks = np.arange(numel) // 256
    values *= np.float32(2.0) ** ((blocks * 7) % 23 - 11).astype(np.float32)
    values[(blocks % 5) == 4] *= np.float32(2.0**-110)  # coded as zeros
    places = generator.integers(0, numel, size=min(numel, 6))
    values[places] = generator.choice(np.array(SPECIAL[:8], dtype=np.float32), size=places.size)
    return torch.from_numpy(values)


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit; NaN has no one pattern."""
    a, b = one.cpu(), other.cpu()
    bits = torch.equal(a.view(torch.int32), b.view(torch.int32))
    return bits or bool(
        ((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all()
    )


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("numel", NUMELS)
def test_blocks_are_coded_to_the_same_bytes_and_decoded_to_the_same_values(
    name: str, numel: int, device: torch.device
) -> None:
    from lowcomm_node.trainer.device import blocks

    for seed in range(4):
        vector, chosen = drawn(numel, seed), codec(name)
        expected = bytearray(chosen.coded_size(numel))
        chosen.encode(vector.numpy(), memoryview(expected))
        coded = torch.full((len(expected),), 0xAA, dtype=torch.uint8, device=device)
        blocks.encode(name, vector.to(device), coded)
        assert coded.cpu().numpy().tobytes() == bytes(expected)

        values = np.empty(numel, dtype=np.float32)
        chosen.decode(bytes(expected), values)
        decoded = torch.full((numel,), 7.0, device=device)
        blocks.decode(name, coded, decoded)
        assert same(decoded, torch.from_numpy(values))


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_blocks_refuse_what_the_host_refuses_with_the_same_words(
    name: str, device: torch.device
) -> None:
    from lowcomm_node.trainer.device import blocks

    chosen, vector = codec(name), drawn(700, 1)
    out = torch.zeros(chosen.coded_size(700), dtype=torch.uint8, device=device)
    for place, value in ((3, float("nan")), (520, float("-inf"))):
        broken = vector.clone()
        broken[place] = value
        with pytest.raises(CodecError) as here:
            chosen.encode(broken.numpy(), memoryview(bytearray(chosen.coded_size(700))))
        with pytest.raises(CodecError) as there:
            blocks.encode(name, broken.to(device), out)
        assert str(there.value) == str(here.value)

    generator, refused = np.random.default_rng(0), 0
    for count in (256, 257, 301, 510):
        data = bytearray(chosen.coded_size(count))
        chosen.encode(drawn(count, 2).numpy(), memoryview(data))
        for _ in range(60):
            broken_data = bytearray(data)
            broken_data[generator.integers(len(data))] = generator.choice([0x08, 0x80, 0xFF, 0x40])
            told = [_refusal(chosen, broken_data, count), None]
            into = torch.full((count,), 7.0, device=device)
            sent = torch.frombuffer(broken_data, dtype=torch.uint8).to(device)
            try:
                blocks.decode(name, sent, into)
            except CodecError as error:
                told[1] = str(error)
                assert bool((into == 7.0).all()), "nothing is written"
            assert told[0] == told[1]
            refused += told[0] is not None
    assert refused, "some of them are refused"


def _refusal(chosen, data: bytearray, count: int) -> str | None:
    try:
        chosen.decode(bytes(data), np.empty(count, dtype=np.float32))
    except CodecError as error:
        return str(error)
    return None


def test_codecs_without_a_kernel_are_refused_by_name(device: torch.device) -> None:
    from lowcomm_node.trainer.device import blocks

    with pytest.raises(CodecError, match="'q1'"):
        blocks.encode("q1", torch.zeros(1, device=device), torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("numel", [5, 256, 300, 5000])
def test_modulo_gives_the_same_bytes_hashes_and_wrapped_blocks(
    bits: int, numel: int, device: torch.device
) -> None:
    from lowcomm_node.trainer.device import modulo

    wrapped: set[int] = set()
    for seed in range(3):
        ours = drawn(numel, seed)
        theirs = ours + 0.01 * drawn(numel, seed + 100) * (torch.arange(numel) // 256 % 3 != 1)
        ranges = torch.from_numpy(
            np.abs((ours - theirs).numpy()[::256]).astype(np.float32) * np.float32(1.7)
        )
        ranges[:: max(1, len(ranges) // 3)] *= -1.0  # of some blocks none is known
        sender, receiver = ModuloCoder(bits, numel), ModuloCoder(bits, numel)
        sender.restore({"range": ranges.numpy()})
        receiver.restore({"range": ranges.numpy()})
        expected, decoded = bytearray(sender.max_size), theirs.clone().numpy()
        size = sender.encode(decoded, memoryview(expected))

        wanted = sender._ranges * np.float32(2.0 * 2.0 / (1 << bits))
        vector, own = theirs.to(device, copy=True), torch.empty(numel, device=device)
        coded = torch.zeros(sender.max_size, dtype=torch.uint8, device=device)
        hashes = torch.full((len(ranges),), -1, dtype=torch.int64, device=device)
        written = modulo.encode(
            vector, torch.from_numpy(wanted).to(device), bits, own, coded, hashes
        )
        assert written == size - 8
        assert coded[:written].cpu().numpy().tobytes() == bytes(expected[:written])
        assert same(vector, torch.from_numpy(decoded)) and same(own, theirs)
        assert np.array_equal(hashes.cpu().numpy().view(np.uint64), sender._sent_hashes)

        receiver.encode(ours.clone().numpy(), memoryview(bytearray(receiver.max_size)))
        out = np.zeros(numel, dtype=np.float32)
        receiver.decode(memoryview(expected)[:size], out)
        codes = np.zeros(len(ranges), dtype=np.uint8)
        data = np.frombuffer(expected, dtype=np.uint8)[:written]
        assert modulo_check(data, 0, numel, bits, codes) == (len(ranges), written)
        result = torch.zeros(numel, device=device)
        bad = torch.full((len(ranges),), 9, dtype=torch.uint8, device=device)
        modulo.decode(
            coded[:written], torch.from_numpy(codes).to(device), bits, ours.to(device), result,
            hashes, bad,
        )  # fmt: skip
        assert same(result, torch.from_numpy(out))
        assert np.array_equal(bad.cpu().numpy(), receiver._bad)
        assert np.array_equal(hashes.cpu().numpy().view(np.uint64), receiver._hashes)
        if numel == 5000:
            assert set(codes) > {0}, "some blocks are coded as remainders, some as bf16"
            wrapped.update(receiver._bad)
    assert wrapped in (set(), {0, 1}), "some blocks wrap, others do not"


def test_modulo_says_which_block_is_not_finite(device: torch.device) -> None:
    from lowcomm_node.trainer.device import modulo

    vector = drawn(900, 3)
    vector[600] = float("inf")
    room = torch.zeros(4 * HEADER + 2 * 900, dtype=torch.uint8, device=device)
    wanted, hashes = torch.full((4,), -1.0, device=device), torch.zeros(4, dtype=torch.int64)
    own = torch.empty(900, device=device)
    assert modulo.encode(vector.to(device), wanted, 4, own, room, hashes.to(device)) == -1 - 2


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_the_outer_step_gives_the_same_bits(
    settings: OuterSettings, numel: int, device: torch.device
) -> None:
    from lowcomm_node.trainer.device import outer as on_device

    for seed in range(3):
        theta, phi, delta, mean = (drawn(numel, 10 * seed + k) for k in range(4))
        there = [one.to(device) for one in (theta, phi, delta, mean)]
        sent = on_host.contribution(settings, phi, theta)
        assert same(on_device.contribution(settings, there[1], there[0]), sent)
        for own in (False, True):
            more = (theta - phi, sent) if own else ()
            slow, momentum = phi.clone(), delta.clone()
            on_host.outer_step(settings, slow, momentum, mean, *more)
            moved, kept = there[1].clone(), there[2].clone()
            on_device.outer_step(settings, moved, kept, there[3], *(one.to(device) for one in more))
            assert same(moved, slow) and same(kept, momentum)


@pytest.mark.parametrize("settings", [SETTINGS[0], *SETTINGS[2:]], ids=str)
def test_a_merge_gives_the_same_bits_and_sees_what_is_not_finite(
    settings: OuterSettings, device: torch.device
) -> None:
    from lowcomm_node.trainer.device import outer as on_device

    for numel in NUMELS:
        theta, phi = drawn(numel, 1), drawn(numel, 2)
        captured = torch.where(torch.arange(numel) % 3 == 0, theta, drawn(numel, 3))
        for broken in (None, float("nan"), float("inf")):
            if broken is not None:
                phi[numel // 2] = broken
            expected = torch.empty(numel)
            finite = on_host.merge(settings, theta, phi, captured, expected)
            out = captured.to(device, copy=True)  # in its place, as the trainer does
            here = on_device.merge(settings, theta.to(device), phi.to(device), out, out)
            assert here is finite is (broken is None)
            assert same(out, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_means_and_spreads_give_the_same_bits(count: int, device: torch.device) -> None:
    from lowcomm_node.trainer.device import outer as on_device

    for numel in NUMELS:
        vectors = [drawn(numel, seed) for seed in range(count)]
        there = [one.to(device) for one in vectors]
        for weights in (None, [float(3 * k + 1) for k in range(count)]):
            expected = on_host.mean_contribution(vectors, weights)
            assert same(on_device.mean_contribution(there, weights), expected)
        assert on_device.worst_block_spread(there) == on_host.worst_block_spread(vectors)
        for pull in (0.0, 0.3, 1.0):
            expected_square = on_host.square_apart(vectors[0], vectors[-1], pull)
            assert on_device.square_apart(there[0], there[-1], pull) == expected_square


def test_vectors_that_are_not_alike_are_refused(device: torch.device) -> None:
    from lowcomm_node.trainer.device import outer as on_device

    with pytest.raises(PlanError, match="float32"):
        on_device.contribution(SETTINGS[0], torch.zeros(3, device=device), torch.zeros(4))
    with pytest.raises(PlanError, match="'other'"):
        one = torch.zeros(3, device=device)
        on_device.outer_step(OuterSettings("other", 1.0, 0.0, 0.0, "shift", 0.0), one, one, one)
