"""The arithmetic of a layer, behind one value: plain torch here, FlashInfer's kernels in `shared.engine.cuda.platform`.

None of them looks at a value on the host, and none keeps a tensor, so a step may be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import Routing
from shared.engine.parallel.shares import Share
from shared.engine.quantized.linears import NarrowWeight
from shared.engine.quantized.packed_matrices import PackedMatrices

Gated = Callable[[Tensor], Tensor]  # [tokens, 2 · inner], gate first → [tokens, inner]


class Linear(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] → [rows, outputs]."""


class Head(Protocol):
    """Logits, float32: no two are equal only because they were rounded."""

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """x [rows, hidden] → logits float32 [rows, vocab], which are overwritten and returned."""


@dataclass(frozen=True)
class ExpertBank:
    """The weights of all experts of a layer."""

    gate_up: Tensor  # [experts, 2 · inner, hidden], gate first
    down: Tensor  # [experts, hidden, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 · inner]
    down_bias: Tensor | None = None  # [experts, hidden]
    layer_experts: int | None = None  # of the layer, if other ranks have the others

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.down)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.down.device

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        """Give gate and up, and down, of an expert."""
        return self.gate_up[expert], self.down[expert]


@dataclass(frozen=True)
class PackedBank:
    """The weights of all experts of a layer as their file packs them."""

    gate_up: PackedMatrices  # [experts, 2 · inner, hidden], gate first
    down: PackedMatrices  # [experts, hidden, inner]
    dtype: torch.dtype  # of what they are multiplied with
    gate_up_bias: Tensor | None = None  # [experts, 2 · inner]
    down_bias: Tensor | None = None  # [experts, hidden]
    layer_experts: int | None = None  # of the layer, if other ranks have the others

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.down.values)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.down.values.device

    def matrices(self, expert: int) -> tuple[Tensor, Tensor]:
        """Unpack gate and up, and down, of an expert, into that type."""
        gate_up, down = (
            each.unpacked(expert, 0, each.outputs).to(self.dtype) for each in (self.gate_up, self.down)
        )
        return gate_up, down


Bank = ExpertBank | PackedBank


class ExpertProducts(Protocol):
    """The MLPs of all experts of a layer."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], chosen int64 and weights float32 [tokens, experts of a token] → [tokens, hidden].

        What other ranks have is chosen as the number behind the bank's last expert, with a weight of 0; it gives 0.
        """


class ExpertChoice(Protocol):
    """Which experts a token takes, and how much of each."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits float32 [tokens, experts] → experts int64 and weights float32, [tokens, chosen]."""


class Ops(Protocol):
    """What a decoder's layers are made of. x [tokens, …] in the model's dtype."""

    @property
    def share(self) -> Share:
        """Which of the ranks that compute a model together this one is."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [outputs, inputs], bias [outputs], kept as they are best read."""

    def narrow_linear(self, weight: NarrowWeight, bias: Tensor | None) -> Linear:
        """Like `linear`, of a weight in fewer than 16 bits."""

    def head(self, weight: Tensor) -> Head:
        """weight [vocab, hidden], kept as it is best read."""

    def routing(self, routing: Routing, correction: Tensor | None, device: torch.device) -> ExpertChoice:
        """The choice of a layer's experts; correction float32 [experts], added to scores before it."""

    def experts(self, bank: Bank, gated: Gated) -> ExpertProducts:
        """The products of a bank, kept as it is best read."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Over the last dimension of x [..., size]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum; both may overwrite the arguments."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on each; may overwrite x."""

    def sum_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` of the sum of all ranks' x."""

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x in the order of ranks, [ranks, …]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 · inner], gate first → [tokens, inner]."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_and_mul`, of GELU as approximated by tanh."""
