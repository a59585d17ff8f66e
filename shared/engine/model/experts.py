"""A mixture of experts: each token takes a few of many MLPs, and perhaps one that all tokens take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from shared.engine.checkpoint.dtypes import dtype_name
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.model.gated_mlp import GatedMLP
from shared.engine.model.ops import ExpertBank, ExpertProducts, Gated, Head, Linear
from shared.engine.model.routing import Router
from shared.primitives.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """See `FeedForward`."""

    experts: int
    gate: Head  # its logits are float32, so that rounding makes no two experts equal
    bias: Tensor | None  # of the logits, float32 [experts]
    router: Router
    products: ExpertProducts
    shared: GatedMLP | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        logits = self.gate(x, x.new_empty(len(x), self.experts, dtype=torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        chosen, weights = self.router(logits)
        found = self.products(x, chosen, weights)
        return found if self.shared is None else found + self.shared(x)


# Where torch's grouped product has a kernel. Elsewhere it waits for each step's counts; on 10.3 it was seen to fail.
_GROUPED_CAPABILITIES = ((9, 0), (10, 0))
_GROUPED_EXPERTS_MAX = 1023
_GROUPED_MULTIPLE = 8  # of numbers: rows begin at 16 bytes


def check_grouped(config: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raise `ConfigError` where a GPU of this compute capability cannot compute the model's experts in one product."""
    sizes = {experts.inner for experts in config.experts if experts} | {config.hidden_size}
    if capability not in _GROUPED_CAPABILITIES:
        version = ".".join(map(str, capability))
        raise ConfigError(
            f"experts need a GPU of compute capability 9.0 or 10.0, found {version}: use device cpu"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"experts are computed in bfloat16, got dtype {dtype_name(dtype)}: use bfloat16")
    if any(size % _GROUPED_MULTIPLE for size in sizes):
        raise ConfigError(f"experts need sizes that {_GROUPED_MULTIPLE} divides, found {sorted(sizes)}")
    if any(experts and experts.routing.experts > _GROUPED_EXPERTS_MAX for experts in config.experts):
        raise ConfigError(f"a layer may have {_GROUPED_EXPERTS_MAX} experts on a GPU at most")


class GroupedExperts:
    """See `ExpertProducts`: rows are sorted by their expert, and one product takes all of them.

    Nothing depends on a value but what is read of the weights, so it can be captured as a CUDA graph. An expert that no
    row chose is not read.
    """

    def __init__(self, bank: ExpertBank, gated: Gated) -> None:
        self._gate_up, self._down = bank.gate_up.transpose(1, 2), bank.down.transpose(1, 2)
        self._gate_up_bias, self._down_bias = bank.gate_up_bias, bank.down_bias
        self._gated = gated
        self._numbers = torch.arange(len(bank.down), device=bank.down.device)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        tokens, count = chosen.shape
        of_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(of_expert, self._numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // count)  # one name: what is no longer read is free for what comes
        rows = grouped_mm(rows, self._gate_up, offs=ends)
        if self._gate_up_bias is not None:
            rows += self._gate_up_bias.index_select(0, of_expert)
        rows = grouped_mm(self._gated(rows), self._down, offs=ends)
        if self._down_bias is not None:
            rows += self._down_bias.index_select(0, of_expert)
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
        weighted = rows.view(tokens, count, -1) * weights.unsqueeze(2)  # float32, as the weights are
        return weighted.sum(1).to(x.dtype)


class SeparateExperts:
    """See `ExpertProducts`: one expert after the other, so that a row has the same bits in any batch.

    It looks at values, and so cannot be captured.
    """

    def __init__(
        self, bank: ExpertBank, gated: Gated, linear: Callable[[Tensor, Tensor | None], Linear]
    ) -> None:
        """`linear` makes y = x Wᵀ + b whose row results do not depend on the other rows."""
        none = [None] * len(bank.down)
        self._mlps = [
            GatedMLP(linear(first, first_bias), gated, linear(last, last_bias))
            for first, first_bias, last, last_bias in zip(
                bank.gate_up,
                none if bank.gate_up_bias is None else bank.gate_up_bias,
                bank.down,
                none if bank.down_bias is None else bank.down_bias,
                strict=True,
            )
        ]

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        given = x.new_empty(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            given[tokens, places] = self._mlps[expert](x[tokens])
        found = torch.zeros_like(x)
        for place in range(chosen.shape[1]):  # in one order, which a library's sum does not promise
            found += given[:, place] * weights[:, place : place + 1]
        return found
