"""The pages in docs/ are enough: what was written from them alone does what ours does, to the
bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import from_the_docs as theirs
from lowcomm_node.models.base import build_model, tensor_specs
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_protocol import matching
from lowcomm_protocol import plan as fragments
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.plan import TensorSpec
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.names import codecs_for_groups
from lowcomm_protocol.spec.sections import TrainSettings

SHAPES = [0, 1, 7, 255, 256, 257, 600]


def vectors(numel: int) -> list[np.ndarray]:
    """Usual values, heavy tails, tiny ones, huge ones, many zeros, and all alike."""
    draw = np.random.default_rng(numel)
    usual = draw.standard_normal(numel).astype(np.float32)
    sparse = np.where(draw.random(numel) < 0.9, np.float32(0), usual)
    return [
        usual,
        (usual**5).astype(np.float32),
        (usual * np.float32(1e-30)).astype(np.float32),
        (usual * np.float32(1e-36)).astype(np.float32),
        (usual * np.float32(1e37)).astype(np.float32),
        sparse.astype(np.float32),
        np.full(numel, np.float32(-0.1)),
        np.zeros(numel, dtype=np.float32),
    ]


@pytest.mark.parametrize("numel", SHAPES)
@pytest.mark.parametrize("name", codecs_for_groups())
def test_a_codec_written_from_its_page_writes_and_reads_the_same_bytes(name, numel):
    ours = codec(name)
    for vector in vectors(numel):
        coded = bytearray(ours.coded_size(numel))
        ours.encode(vector, memoryview(coded))
        assert getattr(theirs, f"encode_{name}")(vector) == bytes(coded)
        decoded = np.empty(numel, dtype=np.float32)
        ours.decode(coded, decoded)
        read = np.array(getattr(theirs, f"decode_{name}")(bytes(coded), numel), dtype=np.float32)
        assert read.tobytes() == decoded.tobytes()


@pytest.mark.parametrize("numel", [n for n in SHAPES if n])
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_a_modulo_codec_written_from_its_page_writes_and_reads_the_same_bytes(bits, numel):
    draw = np.random.default_rng(bits)
    for vector in vectors(numel)[:6]:
        noise = (
            draw.standard_normal(numel).astype(np.float32) * np.abs(vector).max() * np.float32(0.01)
        )
        own = (vector + noise).astype(np.float32)
        ranges = np.full(-(-numel // 256), -1, dtype=np.float32)
        ranges[::2] = np.abs(noise).max()
        sender, coded, decoded = written_by_ours(bits, vector, ranges)
        told, seen = theirs.encode_modulo(vector, ranges, bits)
        assert told == coded
        assert np.array(seen, dtype=np.float32).tobytes() == decoded.tobytes()
        receiver = ModuloCoder(bits, numel)
        receiver.encode(own.copy(), memoryview(bytearray(receiver.max_size)))
        out = np.empty(numel, dtype=np.float32)
        again = receiver.decode(memoryview(coded), out)
        values, wrapped = theirs.decode_modulo(coded, own, bits)
        asked = np.flatnonzero(np.unpackbits(np.frombuffer(again, dtype=np.uint8))).tolist()
        assert wrapped == asked
        if again:
            answer = bytearray(sender.max_size)
            del answer[sender.resend(again, decoded, memoryview(answer)) :]
            codes = sender._sent_codes.tolist()
            assert theirs.answer_modulo(vector, codes, wrapped, bits) == bytes(answer[:-8])
            receiver.patch(memoryview(answer), out)
            patched = theirs.patch_modulo(bytes(answer), coded, own, wrapped, bits)
            for number, block in patched.items():
                values[number * 256 : number * 256 + len(block)] = block
        assert np.array(values, dtype=np.float32).tobytes() == out.tobytes() == decoded.tobytes()


def written_by_ours(
    bits: int, vector: np.ndarray, ranges: np.ndarray
) -> tuple[ModuloCoder, bytes, np.ndarray]:
    sender, decoded = ModuloCoder(bits, vector.size), vector.copy()
    sender.restore({"range": ranges})
    out = bytearray(sender.max_size)
    size = sender.encode(decoded, memoryview(out))
    return sender, bytes(out[:size]), decoded


MODELS = [
    (4, 64, 176, 256, False),
    (4, 64, 176, 256, True),
    (6, 32, 64, 4096, False),
    (2, 16, 32, 64, False),
]


def tensors_of(
    layers: int, width: int, feed_forward: int, vocab: int, tied: bool
) -> list[TensorSpec]:
    """As docs/protocol.md lists them."""
    listed = [TensorSpec("embedding.weight", (vocab, width), None, "embedding")]
    for layer in range(layers):
        shapes = {
            "attention_norm": (width,),
            **{f"attention.{one}": (width, width) for one in ("query", "key", "value", "output")},
            **{f"attention.{one}_norm": (width // 4,) for one in ("query", "key")},
            "feed_forward_norm": (width,),
            "feed_forward.gate": (feed_forward, width),
            "feed_forward.up": (feed_forward, width),
            "feed_forward.down": (width, feed_forward),
        }
        listed += [
            TensorSpec(f"blocks.{layer}.{one}.weight", shape, layer, "block")
            for one, shape in shapes.items()
        ]
    listed.append(TensorSpec("norm.weight", (width,), None, "norm"))
    return listed if tied else [*listed, TensorSpec("head.weight", (vocab, width), None, "head")]


@pytest.mark.parametrize("pattern", ["strided", "sequential", "even"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_written_from_its_page_has_the_same_slices_and_digest(model, count, pattern):
    tensors = tensors_of(*model)
    ours = fragments.plan_fragments(tensors, count, pattern)
    flat = [
        (one.name, one.stack.rows, one.stack.width, one.role, one.layer or 0) for one in tensors
    ]
    parts = theirs.plan(flat, count, pattern)
    assert parts == [
        [(s.tensor, s.start, s.stop, s.numel) for s in f.slices] for f in ours.fragments
    ]
    assert theirs.digest(parts, pattern) == ours.digest


@pytest.mark.parametrize("tied", [False, True])
def test_the_page_lists_the_tensors_of_a_model_in_the_order_of_its_plan(tied):
    ours = tensor_specs(build_model(TransformerSettings(tied=tied), 0))
    kept = [
        (one.name, one.shape, one.layer, one.role)
        for one in ours
        if not (tied and one.role == "head")
    ]
    assert kept == [
        (one.name, one.shape, one.layer, one.role) for one in tensors_of(4, 64, 176, 256, tied)
    ]


def test_the_example_of_the_page_is_the_plan_of_the_demo_model():
    ours = fragments.plan_fragments(tensors_of(*MODELS[0]), 4, "strided")
    page = (Path(__file__).parents[3] / "docs" / "fragments.md").read_text()
    assert f"`{ours.digest[:16]}`" in page
    assert ", ".join(f"{fragment.numel:,}" for fragment in ours.fragments[:3]) in page


def test_the_schedule_of_the_page_is_ours():
    for interval in (1, 4, 7, 100):
        for count in range(1, min(interval, 9) + 1):
            for fragment in range(count):
                assert theirs.offset(fragment, count, interval) == fragments.offset(
                    fragment, count, interval
                )


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 12])
def test_a_peer_written_from_the_page_meets_the_partner_that_ours_expects(count):
    peers = [f"peer{number}" for number in range(count)]
    for round_ in range(12):
        for me in peers:
            for pairing, partner_of in (
                ("hypercube", theirs.hypercube_partner),
                ("random", theirs.random_partner),
            ):
                ours = matching.candidates(11, 2, round_, me, peers, 2, pairing)
                partner = partner_of(11, 2, round_, me, peers)
                assert partner is None or ours[0] == partner


@pytest.mark.parametrize(
    "settings", [TransformerSettings(), TransformerSettings(layers=2, tied=True, width=32, heads=2)]
)
def test_a_start_written_from_the_page_has_the_weights_of_ours(settings):
    for name, weight in build_model(settings, 7).named_parameters():
        expected = theirs.start(7, name, tuple(weight.shape), settings.layers)
        assert weight.detach().numpy().tobytes() == expected.tobytes()


def test_a_model_written_from_the_page_gives_the_logits_of_ours():
    settings = TransformerSettings(layers=2)
    model = build_model(settings, 3)
    for norm in [one for name, one in model.named_parameters() if "norm" in name]:
        norm.data.uniform_(0.5, 1.5)
    weights = {
        name: weight.detach().numpy().astype(np.float64)
        for name, weight in model.named_parameters()
    }
    tokens = np.random.default_rng(0).integers(0, 256, settings.context)
    ours = model(torch.from_numpy(tokens)[None]).detach().numpy()[0]
    np.testing.assert_allclose(
        theirs.logits(weights, tokens, settings.heads, settings.rope_base), ours, atol=1e-5
    )


@pytest.mark.parametrize("step", [0, 7, 40, 41, 399, 400, 1000])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_learning_rate_of_the_page_is_ours(step, schedule):
    train = TrainSettings.model_validate({"schedule": schedule})
    theirs_now = theirs.learning_rate(step, 400, train.model_dump())
    assert theirs_now == pytest.approx(learning_rate(train, step, 400), rel=1e-12)
