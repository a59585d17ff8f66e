"""What ranks with some experts each give adds up to what all experts give, by every way to compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.cuda.kernels.packed_experts import PackedKernels
from shared.engine.model.experts import (
    GroupedExperts,
    PackedExperts,
    SeparateExperts,
    UnpackedProducts,
    of_bank,
)
from shared.engine.model.ops import Bank, ExpertBank, ExpertProducts, PackedBank
from shared.engine.model.torch_ops import TorchOps, plain_linear
from shared.engine.parallel.shares import Share
from shared.engine.quantized.packed_matrices import PackedMatrices
from tests.unit.engine.experts.packed_banks import MATRICES, host_kernels

EXPERTS, CHOSEN, TOKENS, HIDDEN, INNER = 7, 3, 11, 64, 32
GATED = TorchOps().silu_and_mul
Make = Callable[[Bank], ExpertProducts]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> PackedKernels:
    return host_kernels(tmp_path_factory.mktemp("packed_experts"))


def ways(kernels: PackedKernels) -> dict[str, tuple[str | None, Make]]:
    """What the bank is packed in, and the products."""

    def packed(bank: Bank) -> ExpertProducts:
        return PackedExperts(_packed(bank), GATED, kernels, None)

    return {
        "grouped": (None, lambda bank: GroupedExperts(bank, GATED)),
        "separate": (None, lambda bank: SeparateExperts(bank, GATED, plain_linear)),
        "unpacked": ("mxfp4", lambda bank: GroupedExperts(bank, GATED, UnpackedProducts())),
        "packed": ("mxfp4", packed),
        "packed, 4 bits": ("int4 by 32", packed),
        "packed, 8 bits": ("fp8 by row", packed),
        "separate, packed": ("mxfp4", lambda bank: SeparateExperts(bank, GATED, plain_linear)),
    }


def _packed(bank: Bank) -> PackedBank:
    assert isinstance(bank, PackedBank)
    return bank


def bank_of(packed: str | None) -> Bank:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    biases = numbers(EXPERTS, 2 * INNER), numbers(EXPERTS, HIDDEN)
    if packed:
        gate_up, down = (
            MATRICES[packed](EXPERTS, *shape) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        )
        return PackedBank(gate_up, down, torch.bfloat16, *biases)
    return ExpertBank(numbers(EXPERTS, 2 * INNER, HIDDEN), numbers(EXPERTS, HIDDEN, INNER), *biases)


def held_of(bank: Bank, held: range) -> Bank:
    """The bank of a rank that has these."""

    def cut(whole: Any) -> Any:
        if isinstance(whole, PackedMatrices):
            zeros = None if whole.zeros is None else cut(whole.zeros)
            return replace(whole, values=cut(whole.values), scales=cut(whole.scales), zeros=zeros)
        return whole[held.start : held.stop].clone()

    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    own: dict[str, Any] = {name: cut(getattr(bank, name)) for name in names}
    return replace(bank, layer_experts=EXPERTS, **own)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ways(PackedKernels(None, None)))  # type: ignore[arg-type]
def test_ranks_add_up_to_all_experts(way: str, ranks: int, kernels: PackedKernels) -> None:
    """Also where a rank's experts are nobody's choice, and whatever lies in memory that no expert wrote."""
    packed, make = ways(kernels)[way]
    bank, generator = bank_of(packed), torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    chosen[0] = torch.arange(CHOSEN)  # of the first rank alone, where there are two
    weights = torch.rand(TOKENS, CHOSEN, generator=generator)
    whole, total = make(bank)(x, chosen, weights).float(), torch.zeros(TOKENS, HIDDEN)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    try:
        for rank in range(ranks):
            held = Share(rank, ranks).of(EXPERTS)
            own = make(held_of(bank, held))(x, *of_bank(held, chosen, weights))
            if ranks == 2 and rank == 1:
                assert not own[0].any(), "no expert of this rank was chosen"
            total += own.float()
    finally:
        torch.use_deterministic_algorithms(False)
    gap = (total - whole).abs().max() / whole.abs().max()
    assert gap < 2**-7, f"sums of rounded parts: {gap:.1e}"
