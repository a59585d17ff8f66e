"""Packed matrices by their formats' own rules, and what their products are compared with: on any device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from shared.engine.cuda.kernels.packed_experts import MANY_SOURCE, SOURCE, PackedKernels
from shared.engine.model.experts import ExpertRows
from shared.engine.quantized.packed_matrices import PackedFormat, PackedMatrices
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host, expanded, with_headers
from tests.unit.engine.quantized.mxfp4_models import packed

SOURCES = (SOURCE, MANY_SOURCE)


def mxfp4_matrices(experts: int, outputs: int, inputs: int) -> PackedMatrices:
    """Of numbers of size 1, and blocks of some sizes."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(experts, outputs, inputs // 32, 32, generator=generator)
    weight *= torch.randint(-3, 4, (experts, outputs, inputs // 32, 1), generator=generator).float().exp2()
    blocks, scales = packed(weight.flatten(2))
    return PackedMatrices(PackedFormat.MXFP4, blocks.flatten(2).contiguous(), scales.contiguous())


def fp8_matrices(experts: int, outputs: int, inputs: int, *, rows: int, columns: int) -> PackedMatrices:
    """With a scale for so many rows, and for so many columns; 1: for all."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    values = (torch.randn(experts, outputs, inputs, generator=generator) * 60).to(torch.float8_e4m3fn)
    across = 1 if columns == 1 else -(-inputs // columns)
    scales = torch.rand(experts, -(-outputs // rows), across, generator=generator) / 30 + 1e-3
    return PackedMatrices(PackedFormat.FP8, values, scales, scale_rows=rows)


def int4_matrices(experts: int, outputs: int, inputs: int, *, group: int) -> PackedMatrices:
    """With a scale and a zero for so many inputs, or for all where it does not divide them."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    groups = 1 if inputs % group else inputs // group
    values = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 17, (experts, outputs, groups), generator=generator).to(torch.uint8)
    scales = torch.rand(experts, outputs, groups, generator=generator) / 30 + 1e-3
    return PackedMatrices(PackedFormat.INT4, values, scales, zeros=zeros)


MATRICES: dict[str, Callable[[int, int, int], PackedMatrices]] = {
    "mxfp4": mxfp4_matrices,
    "fp8 by row": lambda *shape: fp8_matrices(*shape, rows=1, columns=1),
    "fp8 by blocks": lambda *shape: fp8_matrices(*shape, rows=128, columns=128),
    "fp8 by rows of blocks": lambda *shape: fp8_matrices(*shape, rows=1, columns=128),
    "int4 by 32": lambda *shape: int4_matrices(*shape, group=32),
    "int4 by 128": lambda *shape: int4_matrices(*shape, group=128),
}


def every_code(packing: PackedFormat) -> PackedMatrices:
    """One matrix [256, 160] with every byte that is a number, in every place of four, and many scales."""
    outputs, inputs = 256, 160
    if packing is PackedFormat.MXFP4:
        values = (
            (torch.arange(outputs).view(-1, 1) + torch.arange(inputs // 2)).remainder(256).to(torch.uint8)
        )
        scales = torch.arange(outputs * inputs // 32).view(outputs, -1).remainder(134).add(15).to(torch.uint8)
        return PackedMatrices(packing, values[None], scales[None])
    if packing is PackedFormat.INT4:
        values = (torch.arange(outputs).view(-1, 1) + torch.arange(inputs // 2)).remainder(256)
        places = torch.arange(outputs * inputs // 32).view(outputs, -1)
        scales = (places.remainder(40) - 20).float().exp2() * (1 + places / 5000)
        zeros = places.remainder(17).to(torch.uint8)
        return PackedMatrices(packing, values.to(torch.uint8)[None], scales[None], zeros=zeros[None])
    codes = (torch.arange(outputs).view(-1, 1) + torch.arange(inputs)).remainder(256).to(torch.uint8)
    codes[(codes & 127) == 127] = 0  # not a number
    scales = torch.rand(1, 2, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    return PackedMatrices(packing, codes[None].view(torch.float8_e4m3fn), scales, scale_rows=128)


def on(matrices: PackedMatrices, device: torch.device) -> PackedMatrices:
    """Matrices on a device."""
    zeros = None if matrices.zeros is None else matrices.zeros.to(device)
    return replace(
        matrices, values=matrices.values.to(device), scales=matrices.scales.to(device), zeros=zeros
    )


def weights_of(matrices: PackedMatrices) -> Tensor:
    """float32 [experts, outputs, inputs], as products in bfloat16 take them."""
    each = [matrices.multiplied(expert, 0, matrices.outputs) for expert in range(len(matrices.values))]
    return torch.stack(each)


def host_kernels(folder: Path, right: str = "", wrong: str = "", known: Path | None = None) -> PackedKernels:
    """Both sources, run on this CPU; with one text in place of another, if they are given.

    `known` has the libraries of the sources as they are: what the change does not reach is not compiled again.
    """
    return PackedKernels(*(LateLaunch(source, folder, right, wrong, known) for source in SOURCES))


@dataclass
class LateLaunch:
    """`Launch` of a source, changed or not, on this CPU. It is compiled when it is launched first."""

    source: Path
    folder: Path
    right: str
    wrong: str
    known: Path | None

    @cached_property
    def _on_host(self) -> HostLaunch:
        return HostLaunch(self._library(), threads=64)

    def _library(self) -> Path:
        if not self.right:
            return compile_for_host(self.source, self.folder)
        changed = with_headers(self.source, self.folder, self.right, self.wrong)
        if self.known is not None and expanded(changed) == expanded(self.source):
            unchanged = self.known / f"{self.source.stem}.so"
            return unchanged if unchanged.exists() else compile_for_host(self.source, self.known)
        return compile_for_host(changed, self.folder)

    def __call__(
        self, name: str, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        """See `Launch`."""
        self._on_host(name, blocks, threads, arguments)


def assert_exact(kernels: PackedKernels, matrices: PackedMatrices, width: int, *, many: bool = False) -> None:
    """Of rows of one number each comes a weight, rounded once, and no sum."""
    inputs, device = matrices.inputs, matrices.values.device
    plan = kernels.plan(torch.zeros(inputs, dtype=torch.int64, device=device), 1)
    tiles = [(0, first, min(width, inputs - first)) for first in range(0, inputs, width)]
    plan = ExpertRows(plan.order, torch.tensor(tiles, dtype=torch.int32, device=device), width, many)
    found = kernels.multiply(torch.eye(inputs, device=device).bfloat16(), plan, matrices, None)
    assert torch.equal(found, weights_of(matrices)[0].t().bfloat16())


def assert_sums(kernels: PackedKernels, matrices: PackedMatrices, tokens: int, *, many: bool = False) -> None:
    """Products, with a bias and without, are the sums that float64 finds, but for rounding. A token has 3 experts."""
    experts, inputs, device = len(matrices.values), matrices.inputs, matrices.values.device
    generator = torch.Generator().manual_seed(inputs)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    x, bias = numbers(tokens, inputs + 8)[:, :inputs], numbers(experts, matrices.outputs)  # rows lie apart
    chosen = torch.rand(tokens, experts, generator=generator).topk(3).indices.to(device)
    plan, of_row = kernels.plan(chosen, experts, many=many), chosen.flatten()
    products, sizes = x.new_empty(2, len(of_row), matrices.outputs, dtype=torch.float64)
    rows = x.repeat_interleave(3, 0).double()
    for expert, weight in enumerate(weights_of(matrices)):
        its = of_row == expert
        products[its] = rows[its] @ weight.double().t()
        sizes[its] = rows[its].abs() @ weight.double().t().abs()
    for added in (bias, None):
        wanted = products if added is None else products + added[of_row].double()
        found = kernels.multiply(x, plan, matrices, added).double()
        # A sum of n products in float32, of scales, of warps and of a bias, then one rounding to bfloat16.
        bound = (inputs + 8) * 2**-24 * (sizes + 4) + 2**-8 * wanted.abs()
        assert ((found - wanted).abs() <= bound).all()
