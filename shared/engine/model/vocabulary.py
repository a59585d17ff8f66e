"""Embedding and head of a decoder: whole, or the rows of one rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.model.ops import Head, Ops

Embed = Callable[[Tensor], Tensor]  # of token ids [tokens] → [tokens, hidden]


@dataclass(frozen=True)
class WholeEmbedding:
    """See `Embed`."""

    rows: Tensor  # [vocab, hidden]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embed`."""
        return self.rows.index_select(0, token_ids)


@dataclass(frozen=True)
class EmbeddingOfRank:
    """See `Embed`: each token is looked up by the rank that has it, and the others add zeros."""

    rows: Tensor  # of this rank's tokens, [tokens, hidden]
    first: int  # of these tokens
    ops: Ops

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embed`."""
        places = token_ids - self.first
        elsewhere = (places < 0) | (places >= len(self.rows))
        x = self.rows.index_select(0, places.clamp(0, len(self.rows) - 1))
        return self.ops.sum(x.masked_fill_(elsewhere.unsqueeze(1), 0.0))


@dataclass(frozen=True)
class HeadOfRanks:
    """See `Head`: each rank computes the logits of its own tokens, and all ranks get all."""

    own: Head
    tokens: int  # of each rank, with those of padding
    ops: Ops

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Head`."""
        own = self.own(x, x.new_empty(len(x), self.tokens, dtype=torch.float32))
        parts = torch.split(logits, self.tokens, dim=1)  # the last one has no padding
        for part, found in zip(parts, self.ops.gather(own), strict=True):
            part.copy_(found[:, : part.shape[1]])
        return logits
