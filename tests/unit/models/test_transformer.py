"""The model is causal, relative in its positions and the same on every peer; sampling keeps to its
bounds."""

import hashlib
import itertools
import math
from collections import Counter
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


GROUPED = SMALL.model_copy(update={"heads": 4, "kv_heads": 2, "head_width": 6})
LLAMA = GROUPED.model_copy(
    update={"qk_norm": False, "rope_scaling": "llama3", "rope_original": 8, "tied": True}
)
QWEN2 = GROUPED.model_copy(update={"qk_norm": False, "qkv_bias": True, "head_width": 0})


def turning(length: int) -> TransformerSettings:
    """Settings with heads of eight channels and a base of 100."""
    return TransformerSettings(context=length, width=32, heads=4, rope_base=100.0)


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


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 7), (2, SMALL.context)])
def test_logits_are_one_row_of_the_vocabulary_for_each_token(batch: int, length: int) -> None:
    logits = make_model()(make_tokens(batch, length))
    assert logits.shape == (batch, length, SMALL.vocab)
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


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


def test_the_rope_table_holds_the_angles_of_the_paper() -> None:
    cosine, sine = rope_table(turning(12))
    for position, pair in itertools.product(range(12), range(4)):
        angle = position * 100.0 ** (-2 * pair / 8)
        assert cosine[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert sine[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_llama3_slows_low_frequencies_and_leaves_high_ones() -> None:
    plain = TransformerSettings(context=64, width=128, heads=2, rope_base=10_000.0)
    scaled = plain.model_copy(update={"rope_scaling": "llama3", "rope_original": 32})
    angles = [torch.atan2(*rope_table(one).flip(0)[:, 1].double()) for one in (plain, scaled)]
    slowed = angles[0] / angles[1]
    assert float(slowed[0]) == pytest.approx(1.0), "32 / 2 pi = 5 turns are more than 4"
    assert slowed[-20:].numpy() == pytest.approx(8.0, rel=1e-3), "far less than one turn"
    assert bool((slowed[1:] >= slowed[:-1] - 1e-4).all())


@torch.no_grad()
def test_heads_that_share_keys_compute_what_copied_keys_would() -> None:
    shared = make_model(GROUPED)
    copied = make_model(GROUPED.model_copy(update={"kv_heads": 4}))
    state = shared.state_dict()
    for name in [name for name in state if name.endswith(("key.weight", "value.weight"))]:
        state[name] = state[name].view(2, 6, -1).repeat_interleave(2, 0).flatten(0, 1)
    copied.load_state_dict(state, strict=False)
    tokens = make_tokens(2, 16)
    torch.testing.assert_close(shared(tokens), copied(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [DEMO, SMALL, TIED, SMALL.model_copy(update={"heads": 1, "layers": 5})]
)
def test_parameters_are_as_many_as_the_settings_say(settings: TransformerSettings) -> None:
    width, head = settings.width, settings.width // settings.heads
    block = 4 * width**2 + 3 * width * settings.feed_forward + 2 * width + 2 * head
    embeddings = settings.vocab * width * (1 if settings.tied else 2)
    model = Transformer(settings)
    assert (
        sum(weight.numel() for weight in model.parameters())
        == embeddings + settings.layers * block + width
    )
    assert (
        sum(math.prod(spec.shape) for spec in tensor_specs(model))
        == embeddings + settings.layers * block + width
    )


@torch.no_grad()
def test_a_tied_model_reads_and_writes_with_one_matrix() -> None:
    tied = make_model(TIED)
    assert tied.head is None
    assert [name for name in tied.state_dict() if "head" in name] == []
    hidden: list[Tensor] = []
    tied.norm.register_forward_hook(lambda *seen: hidden.append(seen[-1]))
    logits = tied(make_tokens(2, 5))
    torch.testing.assert_close(logits, hidden[0] @ tied.embedding.weight.T)


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


def test_weights_depend_on_the_seed_and_on_nothing_before() -> None:
    torch.manual_seed(1)
    first = digest_of(build_model(SMALL, 7))
    torch.manual_seed(2)
    torch.rand(5)
    state = torch.get_rng_state()
    assert digest_of(build_model(SMALL, 7)) == first
    assert torch.equal(torch.get_rng_state(), state), "nor does it draw from torch's random state"
    assert digest_of(build_model(SMALL, 8)) != first


def test_every_parameter_gets_a_gradient_and_a_few_steps_learn_a_text() -> None:
    model = build_model(SMALL, 0)
    tokens = make_tokens(4, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses: list[float] = []
    for _ in range(40):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        missing = [
            name
            for name, weight in model.named_parameters()
            if weight.grad is None or not weight.grad.any()
        ]
        assert missing == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_text_longer_than_the_context_is_refused() -> None:
    model = make_model()
    model(make_tokens(1, SMALL.context))
    with pytest.raises(ConfigError, match=r"17 tokens exceeds context = 16: pass fewer"):
        model(make_tokens(1, SMALL.context + 1))
    cache = KeyValueCache(SMALL, model.embedding.weight)
    with torch.no_grad():
        model(make_tokens(1, 10), cache)
        with pytest.raises(ConfigError, match="17 tokens"):
            model(make_tokens(1, 7), cache)
        assert cache.length == 10
        model(make_tokens(1, 6), cache)


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


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 40])
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, None), (2.0, None), (0.5, None), (1.0, 4), (1.0, 1000)]
)
def test_tokens_are_drawn_as_often_as_the_model_says(temperature: float, top_k: int | None) -> None:
    model = make_model()
    logits = model(torch.tensor([[3, 1]]))[0, -1]
    if top_k is not None and top_k < SMALL.vocab:
        logits[logits < logits.sort(descending=True).values[top_k - 1]] = -torch.inf
    chances = (logits / temperature).softmax(dim=0).tolist()
    draws = 500
    counts = Counter(
        next(generate(model, [3, 1], 1, temperature, top_k, seed)) for seed in range(draws)
    )
    for token, chance in enumerate(chances):
        spread = math.sqrt(draws * chance * (1 - chance))
        assert abs(counts[token] - draws * chance) <= 4 * spread + 1, (token, chance, counts[token])


@pytest.mark.parametrize("prompt", [[], [-1], [1, SMALL.vocab], [10**30]])
def test_a_prompt_that_is_not_text_of_the_run_is_refused_at_once(prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"at least one token, each from 0 to 22: pass some text"):
        generate(make_model(), prompt, 1)
