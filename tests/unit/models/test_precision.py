"""In which precision models compute, and how blocks are compiled."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowcomm_node.models.inference import generate
from lowcomm_node.models.transformer import Transformer, build_transformer
from lowcomm_node.trainer.gpu import loss_of
from lowcomm_protocol.spec.models import TransformerSettings

SMALL = TransformerSettings(vocab=258, context=32, width=32, heads=2, layers=3, feed_forward=64)


@pytest.fixture
def model() -> Transformer:
    """A small one."""
    return build_transformer(SMALL, 0)


@pytest.fixture
def autocast() -> Iterator[None]:
    """As on a GPU."""
    with torch.autocast("cpu", torch.bfloat16):
        yield


def streams(model: Transformer, tokens: torch.Tensor) -> list[torch.dtype]:
    """The precision of what each block adds to."""
    seen: list[torch.dtype] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        for block in model.blocks
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.usefixtures("autocast")
def test_within_autocast_the_residual_stream_is_in_bf16(model: Transformer) -> None:
    tokens = torch.arange(32).view(1, 32)
    assert streams(model, tokens) == [torch.bfloat16] * 3
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.slow
def test_blocks_are_compiled_once_and_only_for_training(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounter

    counter, compiler = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda target, **_: compiler(target, backend=counter))
    monkeypatch.setattr(nn.Module, "compile", _compile)
    tokens = torch.arange(64).view(2, 32)
    expected = model.loss(tokens, tokens)
    loss = loss_of(model, compiled=True)
    assert torch.equal(loss(tokens, tokens), expected)
    assert counter.frame_count == 1, "three blocks share what one was compiled to"
    assert len(list(generate(model, [1, 2, 3], 5, 0.0, 1, 0))) == 5
    assert counter.frame_count == 1, "texts that grow are not compiled"
    assert loss_of(build_transformer(SMALL, 0), compiled=False)(tokens, tokens) == expected
    assert counter.frame_count == 1


def _compile(module: nn.Module) -> None:
    """`nn.Module.compile`, by the compiler of the test."""
    module._compiled_call_impl = torch.compile(module._call_impl)  # type: ignore[assignment]
