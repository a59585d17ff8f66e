"""Experts that stay packed, on a GPU: the products of their kernels, and layers of them as graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.experts_config import ClampedGate, Routing
from shared.engine.checkpoint.families import Activation
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.packed_experts import MANY_WIDTHS, WIDTHS, PackedKernels
from shared.engine.cuda.platform import Platform
from shared.engine.model.experts import MANY_ROWS, has_grouped
from shared.engine.model.gated_mlp import clamped, gated
from shared.engine.model.ops import Gated, PackedBank
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.packed_matrices import PackedFormat
from tests.unit.engine.experts.packed_banks import (
    MATRICES,
    assert_exact,
    assert_sums,
    every_code,
    on,
    weights_of,
)
from tests.unit.engine.experts.plain_routing import ROUTINGS, assert_as_read_plainly, logits_of

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 3, 416, 96  # hidden is no multiple of 128, as in gpt-oss
ROWS = (1, 17, 40, 200)  # by each width of a tile, and so many that they are unpacked for


@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_routed_as_a_plain_reading_does(gpu: torch.device, routing: Routing, tied: bool) -> None:
    assert_as_read_plainly(GpuRouting.compiled(gpu), routing, logits_of(41, routing.experts, tied=tied), gpu)


TILES = [(width, False) for width in WIDTHS] + [(width, True) for width in MANY_WIDTHS]


@pytest.mark.parametrize(("width", "many"), TILES)
@pytest.mark.parametrize("packing", PackedFormat)
def test_packed_experts_are_read_exactly(
    gpu: torch.device, packing: PackedFormat, width: int, many: bool
) -> None:
    assert_exact(PackedKernels.compiled(gpu), on(every_code(packing), gpu), width, many=many)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 500])
@pytest.mark.parametrize("shape", [(2880, 5760), (768, 2048), (1184, 136)], ids=str)
@pytest.mark.parametrize("kind", MATRICES)
def test_products_of_packed_experts_are_sums_rounded_once(
    gpu: torch.device, kind: str, shape: tuple[int, int], tokens: int, many: bool
) -> None:
    inputs, outputs = shape
    assert_sums(PackedKernels.compiled(gpu), on(MATRICES[kind](8, outputs, inputs), gpu), tokens, many=many)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 5), (64, 128), (8192, 128), (3000, 1000)])
def test_rows_of_packed_experts_are_sorted_and_weighed(gpu: torch.device, tokens: int, experts: int) -> None:
    kernels, rows = PackedKernels.compiled(gpu), 4 * tokens
    chosen = torch.rand(tokens, experts, device=gpu).topk(4).indices
    order = kernels.plan(chosen, experts).order.long()
    assert torch.equal(order.sort().values, torch.arange(rows, device=gpu))
    assert torch.equal(chosen.flatten()[order], chosen.flatten().sort().values)
    x, weights = torch.randn(rows, 768, device=gpu).bfloat16(), torch.rand(tokens, 4, device=gpu)
    wanted = (x.view(tokens, 4, -1).double() * weights.unsqueeze(2)).sum(1)
    assert ((kernels.weigh(x, weights).double() - wanted).abs() <= 2**-8 * wanted.abs() + 2**-20).all()


@pytest.mark.parametrize("kind", MATRICES)
def test_unpacked_experts_are_the_references_bit_for_bit(gpu: torch.device, kind: str) -> None:
    matrices = on(MATRICES[kind](3, 264, 2880), gpu)
    found = torch.empty(3, 136, 2880, dtype=torch.bfloat16, device=gpu)
    PackedKernels.compiled(gpu).unpack(matrices, 128, found)
    assert torch.equal(found, weights_of(matrices)[:, 128:].bfloat16())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["mxfp4", "fp8 by blocks", "int4 by 32"])
def test_packed_experts_as_a_graph_follow_each_step_s_choice(
    platform: Platform, kind: str, rows: int
) -> None:
    """Half of all experts nobody chooses. What the kernel gives a row it gives in any batch."""
    device, generator = platform.device, torch.Generator().manual_seed(rows)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16().to(device)

    biased = kind == "mxfp4"
    bank = PackedBank(
        on(MATRICES[kind](EXPERTS, 2 * INNER, HIDDEN), device),
        on(MATRICES[kind](EXPERTS, HIDDEN, INNER), device),
        torch.bfloat16,
        numbers(EXPERTS, 2 * INNER) if biased else None,
        numbers(EXPERTS, HIDDEN) if biased else None,
    )
    gate = clamped(ClampedGate(1.702, 7.0)) if biased else TorchOps().silu_and_mul
    with platform.forward.on_host():
        products = platform.ops.experts(bank, gate if biased else gated(Activation.SILU, platform.ops))
        steps = [
            (
                numbers(rows, HIDDEN) / math.sqrt(HIDDEN),
                torch.rand(rows, EXPERTS // 2, generator=generator).topk(CHOSEN).indices.to(device),
                torch.rand(rows, CHOSEN, generator=generator).to(device),
            )
            for _ in range(3)
        ]
        x, experts, weights = (each.clone() for each in steps[0])
        y = torch.empty_like(x)

    def work() -> None:
        y.copy_(products(x, experts, weights))

    platform.forward.run(work)
    replay = platform.forward.capture(work)
    platform.forward.synchronize()
    few = not has_grouped(platform.capability or (0, 0)) or rows * CHOSEN <= MANY_ROWS * EXPERTS
    for step in steps:
        with platform.forward.on_host():
            for static, each in zip((x, experts, weights), step, strict=True):
                static.copy_(each)
        platform.forward.run(replay)
        platform.forward.synchronize()
        with platform.forward.on_host():
            exact = _exact(bank, gate, step)
            assert float((y.float() - exact).abs().max()) < 0.03 * float(exact.abs().max())
            assert torch.equal(y, products(*step))
            if few and platform.capability is not None:
                alone = products(*(each[:1] for each in step))
                assert torch.equal(alone, y[:1])


def _exact(bank: PackedBank, gate: Gated, step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What a step gives in float32, one expert after the other."""
    x, chosen, weights = step
    exact = torch.zeros(x.shape, device=x.device)
    for expert, (gate_up, down) in enumerate(
        zip(weights_of(bank.gate_up), weights_of(bank.down), strict=True)
    ):
        rows, places = torch.where(chosen == expert)
        inner = x[rows].float() @ gate_up.t()
        if bank.gate_up_bias is not None:
            inner += bank.gate_up_bias[expert].float()
        found = gate(inner) @ down.t()
        if bank.down_bias is not None:
            found += bank.down_bias[expert].float()
        exact.index_add_(0, rows, found * weights[rows, places].unsqueeze(1))
    return exact
