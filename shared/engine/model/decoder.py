"""The decoder: all families of `shared.engine.checkpoint.families` in one packed, ragged forward pass.

Rows of all requests lie one after another, [tokens, …]; only attention knows where a request ends. A layer is two
blocks, each added to the residual stream: it knows neither heads nor experts. Which blocks it has is data of
`ModelConfig`, and `shared.engine.model.loading` makes them. What blocks compute with comes as `Ops`, so the same ones
run on packed linears of a CPU and on the kernels of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.attention.protocol import Attention, PagedBatch, PlannedAttention, soft_cap
from shared.engine.checkpoint.families import Norms
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.model.ops import Head, Ops
from shared.engine.model.vocabulary import Embed


class AttentionBlock(Protocol):
    """Lets tokens read those before them, and caches what later ones will read."""

    def __call__(self, x: Tensor, planned: PlannedAttention) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""


class FeedForward(Protocol):
    """Computes each token by itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""


@dataclass(frozen=True)
class DecoderLayer:
    """Attention, then a feed-forward block, each added to the residual stream."""

    config: ModelConfig
    ops: Ops
    attention_norm: Tensor | None  # [hidden]
    attention: AttentionBlock
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    feed_forward: FeedForward
    mlp_post_norm: Tensor | None

    def __call__(
        self, x: Tensor, residual: Tensor | None, planned: PlannedAttention
    ) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] and the stream it is yet to be added to → the same. The first layer's x is the stream."""
        x, residual = self._read(x, residual, self.attention_norm)
        x = self._given(self.attention(x, planned), self.attention_post_norm)
        x, residual = self._read(x, residual, self.mlp_norm)
        return self._given(self.feed_forward(x), self.mlp_post_norm), residual

    def _read(self, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """What a block reads, and the stream."""
        if weight is None:
            stream = x if residual is None else residual + x
            return stream, stream
        epsilon = self.config.rms_norm_eps
        if residual is None:
            return self.ops.rms_norm(x, weight, epsilon), x
        return add_rms_norm_of(self.config, self.ops)(x, residual, weight, epsilon)

    def _given(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """What is added to the stream: on each rank its part of it, unless a norm took the sum."""
        if weight is not None:
            x = self.ops.rms_norm(self.ops.sum(x), weight, self.config.rms_norm_eps)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale


AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # see `Ops.add_rms_norm`


def add_rms_norm_of(config: ModelConfig, ops: Ops) -> AddNorm:
    """Adds what a block gave to the stream, and norms it: ranks add up here where no norm behind the block did."""
    return ops.sum_add_rms_norm if config.norms is Norms.BEFORE else ops.add_rms_norm


@dataclass(frozen=True)
class DecoderParts:
    """What a decoder is made of, on the device where it computes."""

    embed: Embed
    layers: Sequence[DecoderLayer]
    norm: Tensor  # [hidden]
    head: Head


class DecoderModel:
    """Token ids to logits, on the device where its weights are."""

    def __init__(self, config: ModelConfig, ops: Ops, parts: DecoderParts) -> None:
        self.config = config
        self.layers_done = 0
        self._ops = ops
        self._parts = parts

    def run(
        self,
        token_ids: Tensor,
        attention: PlannedAttention,
        sampled_rows: Tensor | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """token_ids [tokens], sampled_rows [rows] or None for all → logits float32 [rows, vocab], where they are given.

        The integers are of 32 or 64 bits. Nothing here waits for the device or depends on a value, so the call may be
        captured as a CUDA graph.
        """
        x, residual = self.hidden(token_ids, attention, sampled_rows)
        if logits is None:
            logits = x.new_empty(len(x), self.config.vocab_size, dtype=torch.float32)
        return self.head(x, residual, logits)

    def hidden(
        self, token_ids: Tensor, attention: PlannedAttention, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `run`, up to the last layer: what it gives and the stream that is yet to be added to, [rows, hidden]."""
        x, residual = self._parts.embed(token_ids), None
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        for layer in self._parts.layers:
            x, residual = layer(x, residual, attention)
            self.layers_done += 1
        assert residual is not None, "a decoder has layers"
        if rows is None:
            return x, residual
        return x.index_select(0, rows), residual.index_select(0, rows)

    def head(self, x: Tensor, residual: Tensor, logits: Tensor) -> Tensor:
        """Write the logits of what `hidden` gave, which may be overwritten, and return them."""
        if not len(logits):
            return logits
        norm = add_rms_norm_of(self.config, self._ops)
        x, _ = norm(x, residual, self._parts.norm, self.config.rms_norm_eps)
        assert len(logits) == len(x), "torch resizes what does not fit"
        self._parts.head(x, logits)
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
        if self.config.logits_cap is not None:
            logits.copy_(soft_cap(logits, self.config.logits_cap))
        return logits


class PlanningDecoder:
    """`Model` by a decoder, with an attention that is planned in each step."""

    def __init__(self, decoder: DecoderModel, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    @property
    def layers_done(self) -> int:
        """See `Model`."""
        return self._decoder.layers_done

    def forward(self, token_ids: Tensor, batch: PagedBatch, sampled_rows: Tensor) -> Tensor:
        """See `Model`."""
        return self._decoder.run(token_ids, self._attention.plan(batch), sampled_rows)
