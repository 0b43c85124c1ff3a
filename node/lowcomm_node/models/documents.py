"""Attention that keeps within documents: where they begin in a window, and the mask of that.

A separator is the last token of its document. Rotary positions are relative, so with the mask alone
they act as if each document began at 0. Learned positions are passed explicitly.

Blocks that are compiled for a GPU take flex attention, which computes no block of the matrix of
queries and keys that is masked as a whole. Elsewhere a mask is added to this matrix; all layers
share it.
"""

from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lowcomm_node.data import Tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import family_of
from lowcomm_protocol.spec.run import RunSpec

Mask: TypeAlias = Any
"""A tensor that is added to the products of queries and keys, or flex attention's ``BlockMask``."""


def check_documents(spec: RunSpec, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a run keeps attention within documents, and its model or its tokenizer
    can't."""
    if not spec.train.document_mask:
        return
    if tokenizer.separator is None and spec.data.end_token is None:
        raise ConfigError(
            f"train.document_mask needs a token after each document, and {tokenizer.file} names "
            "none: the run's creator sets data.end_token to one of its tokens, or document_mask = "
            "false."
        )
    if not family_of(spec.model).separates:
        raise ConfigError(
            f"Models of kind {spec.model.kind!r} can't keep attention within documents: the run's "
            "creator sets train.document_mask = false, or chooses another kind of model."
        )


def document_starts(tokens: Tensor, separator: int) -> Tensor:
    """The place in its window where each token's document begins, int64 ``[batch, length]``."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    begins = F.pad(tokens[:, :-1] == separator, (1, 0))
    return torch.where(begins, places, 0).cummax(-1).values


def document_mask(starts: Tensor, dtype: torch.dtype, blocks: bool) -> Mask:
    """The mask for attention to earlier tokens of the same document.

    ``starts``: of ``document_starts``; ``dtype``: of queries; ``blocks``: whether flex attention
    takes it.
    """
    batch, length = starts.shape
    if blocks:

        def sees(window: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= starts[window, query])

        Flex.prepare()
        return Flex.mask(sees, batch, None, length, length, starts.device)
    places = torch.arange(length, device=starts.device)
    seen = (places <= places[:, None]) & (places >= starts[:, :, None])
    mask = torch.zeros(batch, 1, length, length, dtype=dtype, device=starts.device)
    return mask.masked_fill_(~seen[:, None], -torch.inf)


class Flex:
    """Functions of flex attention, compiled, or they would hold whole matrices: blocks whose shapes
    change too often are not compiled any more."""

    mask: ClassVar[Any] = None
    attention: ClassVar[Any] = None

    @classmethod
    def prepare(cls) -> None:
        """Import them."""
        if cls.mask is None:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            cls.mask = torch.compile(create_block_mask)
            cls.attention = torch.compile(flex_attention)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, grouped: bool) -> Tensor:
    """Attention with a mask; ``grouped``: whether several heads of queries share one of keys."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
    return Flex.attention(query, key, value, block_mask=mask, enable_gqa=grouped)
