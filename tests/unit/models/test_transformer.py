"""The model is causal, relative in its positions and the same on every peer; sampling keeps to its
bounds."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import build_model, tensor_specs
from lowcomm_node.models.inference import generate
from lowcomm_node.models.transformer import (
    KeyValueCache,
    Transformer,
    rope_table,
)
from lowcomm_protocol.plan import plan_fragments
from lowcomm_protocol.spec.models import TransformerSettings

DEMO = TransformerSettings()
SMALL = TransformerSettings(vocab=23, layers=2, width=16, heads=2, feed_forward=40, context=16)
TIED = SMALL.model_copy(update={"tied": True})


def make_tokens(batch: int, length: int, vocab: int = SMALL.vocab, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_model(settings: TransformerSettings = SMALL, seed: int = 0) -> Transformer:
    """A model with weights far from zero, so that every part of it changes the logits."""
    model = build_model(settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
            else:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def digest_of(model: Transformer) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit_and_always_its_own() -> None:
    model, tokens = make_model(), make_tokens(1, SMALL.context)
    before = model(tokens)
    for place in range(SMALL.context):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % SMALL.vocab
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        differs = (after[:, place:] - before[:, place:]).abs().amax(dim=-1) > 1e-4
        assert differs.all(), "all that follow see it"


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [0, 1])
def test_a_document_is_read_as_if_it_stood_alone(kv_heads: int) -> None:
    model, end = make_model(SMALL.model_copy(update={"kv_heads": kv_heads})), 5
    window = make_tokens(2, SMALL.context).masked_fill_(make_tokens(2, SMALL.context) == end, 6)
    window[0, [2, 7]] = window[1, 10] = end
    before, model.separator = model(window), end
    for row, start, stop in ((0, 0, 3), (0, 3, 8), (0, 8, 16), (1, 0, 11), (1, 11, 16)):
        alone = model(window[row : row + 1, start:stop])[0]
        torch.testing.assert_close(model(window)[row, start:stop], alone, rtol=1e-4, atol=1e-5)
        assert start == 0 or not torch.allclose(before[row, start:stop], alone, atol=0.1)
    loss = model.loss(window, window)
    model.recompute_blocks(True)
    with torch.enable_grad():
        assert model.loss(window, window) == loss, "computed again with the mask"


def test_llama3_slows_low_frequencies_and_leaves_high_ones() -> None:
    plain = TransformerSettings(context=64, width=128, heads=2, rope_base=10_000.0)
    scaled = plain.model_copy(update={"rope_scaling": "llama3", "rope_original": 32})
    angles = [torch.atan2(*rope_table(one).flip(0)[:, 1].double()) for one in (plain, scaled)]
    slowed = angles[0] / angles[1]
    assert float(slowed[0]) == pytest.approx(1.0), "32 / 2 pi = 5 turns are more than 4"
    assert slowed[-20:].numpy() == pytest.approx(8.0, rel=1e-3), "far less than one turn"
    assert bool((slowed[1:] >= slowed[:-1] - 1e-4).all())


@pytest.mark.parametrize("settings", [SMALL, TIED])
def test_the_fragment_plan_learns_of_every_parameter_once(settings: TransformerSettings) -> None:
    with torch.device("meta"):
        specs = tensor_specs(Transformer(settings))
    model = Transformer(settings)
    assert specs == tensor_specs(model), "without memory, too"
    assert [(spec.name, spec.shape) for spec in specs] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert {spec.layer for spec in specs if spec.role == "block"} == {0, 1}
    assert {spec.name for spec in specs if spec.layer == 1} == {
        name for name, _ in model.named_parameters() if name.startswith("blocks.1.")
    }
    outside = {"embedding", "norm"} | (set() if settings.tied else {"head"})
    assert {spec.role for spec in specs if spec.layer is None} == outside
    assert all(spec.storage is None for spec in specs)
    plan = plan_fragments(specs, 2, "strided")
    assert sum(fragment.numel for fragment in plan.fragments) == sum(
        p.numel() for p in model.parameters()
    )


def test_a_seed_gives_the_same_weights_in_every_release() -> None:
    """Peers of one run may have other versions of numpy and torch, and begin with these weights all
    the same."""
    assert (
        digest_of(build_model(DEMO, 0))
        == "a4477345ec001a39be4dc0dd62e7a745d010ddd44dabd53589d0139d2effa426"
    )


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 16, [9, 1, 1, 5], [4, 4, 4, 4], [16]])
def test_a_text_read_in_pieces_has_the_logits_of_the_whole(pieces: list[int]) -> None:
    model, tokens = make_model(), make_tokens(1, 16)
    cache = KeyValueCache(SMALL, model.embedding.weight)
    read: list[Tensor] = []
    start = 0
    for length in pieces:
        read.append(model(tokens[:, start : start + length], cache))
        start += length
        assert cache.length == start
    whole = model(tokens)[:, :start]
    torch.testing.assert_close(torch.cat(read, dim=1), whole, rtol=1e-4, atol=1e-4)


# Sampling


@torch.no_grad()
def reference(
    model: Transformer, prompt: list[int], count: int, choose: Callable[[Tensor], int]
) -> list[int]:
    """Sampling in a few slow lines: every token is predicted from the whole visible text anew."""
    context = model.settings.context
    text = list(prompt)
    visible = text[-context:] if len(text) <= context else text[-(context // 2) :]
    for _ in range(count):
        text.append(choose(model(torch.tensor([visible]))[0, -1]))
        visible = [*visible, text[-1]] if len(visible) < context else text[-(context // 2) :]
    return text[len(prompt) :]


@pytest.mark.parametrize("length", [1, 16, 40])
def test_the_model_reads_its_context_however_long_the_text_gets(length: int) -> None:
    model, prompt = make_model(), make_tokens(1, length)[0].tolist()
    likeliest = reference(model, prompt, 30, lambda logits: int(logits.argmax()))
    assert list(generate(model, prompt, 30, temperature=0)) == likeliest
    generator = torch.Generator().manual_seed(4)
    drawn = reference(
        model,
        prompt,
        45,
        lambda logits: int((logits.double() / 5).softmax(0).multinomial(1, generator=generator)),
    )
    assert list(generate(model, prompt, 45, temperature=5, seed=4)) == drawn
    assert len(set(drawn)) > 10, "a text of one token would prove nothing"


@pytest.mark.parametrize("prompt", [[], [-1], [1, SMALL.vocab], [10**30]])
def test_a_prompt_that_is_not_text_of_the_run_is_refused_at_once(prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"at least one token, each from 0 to 22: pass some text"):
        generate(make_model(), prompt, 1)
