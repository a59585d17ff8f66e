"""A mixture of experts: each token takes a few of many MLPs, and perhaps one that all tokens take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import grouped_mm

from shared.engine.checkpoint.dtypes import dtype_name
from shared.engine.checkpoint.model_config import ModelConfig
from shared.engine.model.gated_mlp import GatedMLP
from shared.engine.model.ops import Bank, ExpertChoice, ExpertProducts, Gated, Head, Linear, PackedBank
from shared.engine.quantized.packed_matrices import PackedMatrices, unpack
from shared.primitives.errors import ConfigError


@dataclass(frozen=True)
class Experts:
    """See `FeedForward`."""

    experts: int
    gate: Head  # its logits are float32, so that rounding makes no two experts equal
    bias: Tensor | None  # of the logits, float32 [experts]
    router: ExpertChoice
    products: ExpertProducts
    shared: GatedMLP | None
    held: range | None = None  # experts of this rank; None: all

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        logits = self.gate(x, x.new_empty(len(x), self.experts, dtype=torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        chosen, weights = self.router(logits)
        if self.held is not None:
            chosen, weights = of_bank(self.held, chosen, weights)
        found = self.products(x, chosen, weights)
        return found if self.shared is None else found + self.shared(x)


def of_bank(held: range, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Name chosen experts by their place in the bank of a rank that holds these; see `ExpertProducts`."""
    places = chosen - held.start
    elsewhere = (places < 0) | (places >= len(held))
    return places.masked_fill_(elsewhere, len(held)), weights.masked_fill(elsewhere, 0.0)


# Where torch's grouped product has a kernel. Elsewhere it waits for each step's counts; on 10.3 it was seen to fail.
_GROUPED_CAPABILITIES = ((9, 0), (10, 0))
PACKED_CAPABILITY = (8, 0)  # of the kernel for packed ones: products of bfloat16
_GROUPED_EXPERTS_MAX = 1023
_GROUPED_MULTIPLE = 8  # of numbers: rows begin at 16 bytes


def check_experts(config: ModelConfig, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raise `ConfigError` where a GPU of this compute capability does not compute the model's experts."""
    sizes = {experts.inner for experts in config.experts if experts} | {config.hidden_size}
    version = ".".join(map(str, capability))
    if config.packed_experts:
        if capability < PACKED_CAPABILITY:
            raise ConfigError(
                f"experts in {config.packed_experts} need a GPU of compute capability 8.0 or higher, found {version}: "
                "use device cpu"
            )
    elif capability not in _GROUPED_CAPABILITIES:
        raise ConfigError(
            f"experts need a GPU of compute capability 9.0 or 10.0, found {version}: use device cpu"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"experts are computed in bfloat16, got dtype {dtype_name(dtype)}: use bfloat16")
    if any(size % _GROUPED_MULTIPLE for size in sizes):
        raise ConfigError(f"experts need sizes that {_GROUPED_MULTIPLE} divides, found {sorted(sizes)}")
    if any(experts and experts.routing.experts > _GROUPED_EXPERTS_MAX for experts in config.experts):
        raise ConfigError(f"a layer may have {_GROUPED_EXPERTS_MAX} experts on a GPU at most")


def has_grouped(capability: tuple[int, int]) -> bool:
    """Whether torch's grouped product runs on a GPU of this compute capability without waiting for it."""
    return capability in _GROUPED_CAPABILITIES


GroupedProduct = Callable[
    [Tensor, Tensor], Tensor
]  # of rows by their expert, and where those of each expert end


def grouped(weight: Tensor) -> GroupedProduct:
    """The product with weights [experts, outputs, inputs]."""
    by_inputs = weight.transpose(1, 2)
    return lambda rows, ends: grouped_mm(rows, by_inputs, offs=ends)


class GroupedExperts:
    """See `ExpertProducts`: rows are sorted by their expert, and one product takes all of them.

    Nothing depends on a value but what is read of the weights, so it can be captured as a CUDA graph. An expert that no
    row chose is not read, if its weights are of 16 bits.
    """

    def __init__(self, bank: Bank, gated: Gated, unpacked: UnpackedProducts | None = None) -> None:
        """`unpacked` computes what a bank has packed."""
        if isinstance(bank, PackedBank):
            assert unpacked is not None
            self._gate_up, self._down = (unpacked.of(each, bank.dtype) for each in (bank.gate_up, bank.down))
        else:
            self._gate_up, self._down = grouped(bank.gate_up), grouped(bank.down)
        self._cut = bank.layer_experts is not None
        self._gate_up_bias, self._down_bias = (
            functional.pad(bias, (0, 0, 0, 1)) if bias is not None and self._cut else bias
            for bias in (bank.gate_up_bias, bank.down_bias)
        )
        self._gated = gated
        self._numbers = torch.arange(bank.experts, device=bank.device)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        count = chosen.shape[1]
        of_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(of_expert, self._numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // count)  # one name: what is no longer read is free for what comes
        rows = self._gate_up(rows, ends)
        if self._gate_up_bias is not None:
            rows += self._gate_up_bias.index_select(0, of_expert)
        rows = self._down(self._gated(rows), ends)
        if self._down_bias is not None:
            rows += self._down_bias.index_select(0, of_expert)
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
        return _weighted(rows, weights, cut=self._cut).to(x.dtype)


# Numbers of a part of packed matrices that are unpacked at a time.
UNPACKED_NUMBERS = 2**29


class UnpackedProducts:
    """Grouped products of packed matrices: part after part is unpacked, into memory that all layers share."""

    def __init__(self, unpack: Callable[[PackedMatrices, int, Tensor], None] = unpack) -> None:
        """`unpack`: see that of `shared.engine.quantized.packed_matrices`."""
        self._unpack = unpack
        self._space: Tensor | None = None

    def of(self, matrices: PackedMatrices, dtype: torch.dtype) -> GroupedProduct:
        """The product with these, of rows of this type."""
        count, outputs, inputs = len(matrices.values), matrices.outputs, matrices.inputs
        at_once = outputs_at_once(count, outputs, inputs)
        size = count * at_once * inputs
        if self._space is None or len(self._space) < size:
            self._space = torch.empty(size, dtype=dtype, device=matrices.values.device)

        def part(rows: Tensor, ends: Tensor, first: int) -> Tensor:
            number = min(at_once, outputs - first)
            assert self._space is not None
            wide = self._space[: count * number * inputs].view(count, number, inputs)
            self._unpack(matrices, first, wide)
            return grouped(wide)(rows, ends)

        def product(rows: Tensor, ends: Tensor) -> Tensor:
            if at_once >= outputs:
                return part(rows, ends, 0)
            y = rows.new_empty(len(rows), outputs)
            for first in range(0, outputs, at_once):
                y[:, first : first + at_once] = part(rows, ends, first)
            return y

        return product


def outputs_at_once(experts: int, outputs: int, inputs: int) -> int:
    """Outputs of each matrix that are unpacked at a time, in equal parts."""
    parts = -(-experts * outputs * inputs // UNPACKED_NUMBERS)
    return -(-outputs // (parts * _GROUPED_MULTIPLE)) * _GROUPED_MULTIPLE


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows by their expert, in tiles of one expert."""

    order: Tensor  # int32 [rows]
    tiles: Tensor  # int32 [as many as any choice needs, 3]: expert, first place in the order, rows
    width: int  # rows of a tile, at most
    many: bool = False  # by the kernel that unpacks a weight once for all rows of a wide tile


class PackedProducts(Protocol):
    """Products that read packed weights, and each of them about once where an expert's rows are few."""

    def plan(self, chosen: Tensor, experts: int, *, many: bool = False) -> ExpertRows:
        """Sort rows by their expert; chosen int64, of any shape. `many`: for products of many rows."""

    def multiply(self, x: Tensor, rows: ExpertRows, weights: PackedMatrices, bias: Tensor | None) -> Tensor:
        """y [rows, outputs] of x [tokens, inputs], each of which so many rows of y read, one after the other.

        bias [experts, outputs].
        """

    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        """y [tokens, size] of x's type: sums of each token's rows times weights float32 [tokens, experts of a token].

        A row of weight 0 may be any bits: its expert is on another rank.
        """


# Rows of an expert on average from which wide tiles take less time, and from which it takes less to unpack all weights.
MANY_ROWS = 32
UNPACKED_ROWS = 64


class PackedExperts:
    """See `ExpertProducts`: of packed weights, read as they are for few rows, unpacked for many."""

    def __init__(
        self, bank: PackedBank, gated: Gated, few: PackedProducts, many: ExpertProducts | None
    ) -> None:
        """`many` None: few is for all."""
        self._bank, self._gated = bank, gated
        self._few, self._many = few, many

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        bank, few = self._bank, self._few
        rows, experts = chosen.numel(), bank.layer_experts or bank.experts
        if self._many is not None and rows > UNPACKED_ROWS * experts:
            return self._many(x, chosen, weights)
        plan = few.plan(chosen, bank.experts, many=rows > MANY_ROWS * experts)
        y = self._gated(few.multiply(x, plan, bank.gate_up, bank.gate_up_bias))
        return few.weigh(few.multiply(y, plan, bank.down, bank.down_bias), weights)


def _weighted(rows: Tensor, weights: Tensor, *, cut: bool) -> Tensor:
    """Sums of each token's rows times weights [tokens, experts of a token], which are float32, as sums are.

    `cut`: rows of weight 0 may be any bits, since their experts are on other ranks.
    """
    by_token = rows.view(*weights.shape, -1)
    if cut:
        by_token = by_token.masked_fill((weights == 0).unsqueeze(2), 0.0)
    return (by_token * weights.unsqueeze(2)).sum(1)


class SeparateExperts:
    """See `ExpertProducts`: one expert after the other, so that a row has the same bits in any batch.

    It looks at values, and so cannot be captured.
    """

    def __init__(self, bank: Bank, gated: Gated, linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
        """`linear` makes y = x Wᵀ + b whose row results do not depend on the other rows, and keeps its own weight.

        What is packed is unpacked for one expert after the other: a layer in float32 is gigabytes.
        """
        first_bias, last_bias = bank.gate_up_bias, bank.down_bias
        self._mlps = []
        for expert in range(bank.experts):
            first, last = bank.matrices(expert)
            self._mlps.append(
                GatedMLP(
                    linear(first, None if first_bias is None else first_bias[expert]),
                    gated,
                    linear(last, None if last_bias is None else last_bias[expert]),
                )
            )

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        given = x.new_zeros(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist()) - {len(self._mlps)}):
            tokens, places = torch.where(chosen == expert)
            given[tokens, places] = self._mlps[expert](x[tokens])
        found = torch.zeros_like(x)
        for place in range(chosen.shape[1]):  # in one order, which a library's sum does not promise
            found += given[:, place] * weights[:, place : place + 1]
        return found
