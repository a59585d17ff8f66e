"""Products of packed experts: the CUDA source, run on this CPU, reads each number exactly, and sums for its row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.engine.cuda.kernels.packed_experts import SOURCE, WIDTHS, PackedKernels, tiles_max, width_of
from shared.engine.quantized.packed_matrices import PackedFormat, unpack
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host
from tests.unit.engine.experts.packed_banks import (
    MATRICES,
    assert_exact,
    assert_sums,
    every_code,
    weights_of,
)

# inputs and outputs: a part of a span, whole spans, a last turn that some warps lack, outputs left
SHAPES = ((32, 8), (96, 40), (128, 32), (1184, 33))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLaunch:
    return HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("packed_experts")), threads=64)


@pytest.mark.parametrize(("rows", "experts"), [(1, 5), (40, 1), (64, 7), (300, 128), (2000, 33), (9, 1024)])
def test_rows_are_sorted_by_expert_and_cut_into_tiles(library: HostLaunch, rows: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, -(-experts // 2), (rows,), generator=generator)  # half of them nobody chooses
    plan = PackedKernels(library).plan(chosen, experts)
    assert sorted(plan.order.tolist()) == list(range(rows))
    assert torch.equal(chosen[plan.order], chosen.sort().values)
    assert len(plan.tiles) == tiles_max(rows, experts, plan.width)
    place, seen = 0, []
    for expert, first, count in plan.tiles.tolist():
        if not count:
            assert (expert, first) == (0, 0)
            continue
        assert first == place
        assert 0 < count <= plan.width
        assert set(chosen[plan.order[first : first + count]].tolist()) == {expert}
        seen.append(expert)
        place += count
    assert place == rows
    whole = torch.bincount(chosen, minlength=experts)
    assert [seen.count(expert) for expert in range(experts)] == [
        -(-count // plan.width) for count in whole.tolist()
    ]


def test_no_choice_needs_more_tiles_than_are_made() -> None:
    for rows in range(1, 80):
        for experts in range(1, 12):
            for width in (8, 16, 32):
                lonely = min(experts, rows)  # one row each, and all the others of one expert
                assert lonely - 1 + -(-(rows - lonely + 1) // width) <= tiles_max(rows, experts, width)


def test_tiles_are_wider_where_experts_have_more_rows() -> None:
    assert [width_of(rows, 32) for rows in (1, 128, 129, 256, 257, 10_000)] == [8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MATRICES)
def test_unpacked_numbers_are_the_references_bit_for_bit(
    library: HostLaunch, kind: str, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    matrices = MATRICES[kind](3, outputs, inputs)
    wanted = weights_of(matrices).bfloat16()
    for first, rows in ((0, outputs), (3, outputs - 5)):
        found, beside = torch.full((2, 3, rows, inputs), torch.nan).bfloat16()
        PackedKernels(library).unpack(matrices, first, found)
        assert torch.equal(found, wanted[:, first : first + rows])
        unpack(matrices, first, beside)
        assert torch.equal(found, beside)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("packing", PackedFormat)
def test_every_code_and_scale_is_multiplied_exactly(
    library: HostLaunch, packing: PackedFormat, width: int
) -> None:
    assert_exact(PackedKernels(library), every_code(packing), width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MATRICES)
def test_products_are_sums_of_float32_rounded_once(
    library: HostLaunch, kind: str, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    assert_sums(PackedKernels(library), MATRICES[kind](4, outputs, inputs), tokens=6)


MISTAKES = {
    "a number of x is another": ("words.of[step + 2], 0x5410u", "words.of[step + 2], 0x7632u"),
    "signs are lost": ("(codes & 0x80008000u) | ((codes >> 6)", "((codes >> 6)"),
    "signs of 8 bits are lost": ("(codes & 0x80008000u) | ((codes >> 4)", "((codes >> 4)"),
    "scales are twice as large": ("[place] + 106", "[place] + 107"),
    "a scale is its neighbour's": ("+ (at[ahead] >> chunks", "+ ((at[ahead] ^ 1) >> chunks"),
    "a scale is that of the first block": ("span < last_span ? span : last_span", "0"),
    "a scale is that of the first rows": ("output / bank.scale_rows;", "0;"),
    "what lies behind the end counts": (" & mask[ahead]", ""),
    "a warp's part is left out": ("part < WARPS;", "part < WARPS - 1;"),
    "a bias is another expert's": ("bias[(i64)expert *", "bias[(i64)(expert ^ 1) *"),
    "a weight is another expert's": (
        "(i64)expert * bank.outputs + (output",
        "(i64)(expert ^ 1) * bank.outputs + (output",
    ),
    "a number of 4 bits is its neighbour's": ("4 * (i ^ 1)", "4 * i"),
    "a zero is left out": ("{scale.bits * TWICE, zero.bits * TWICE}", "{scale.bits * TWICE, NOTHING}"),
    "a zero is of another group": ("bank.zeros[place]", "bank.zeros[place ^ 1]"),
    "groups are of another size": ("<< log2 <", "<< log2 + 1 <"),
    "x is another token's": ("row : 0)] / chosen * x_stride", "row : 0)] / chosen * 0"),
    "a row is written to its place in the order": ("y[(i64)order[first + row] *", "y[(i64)(first + row) *"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_source_is_seen(mistake: str, tmp_path: Path) -> None:
    text, (right, wrong) = SOURCE.read_text(), MISTAKES[mistake]
    assert right in text
    for header in SOURCE.parent.glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = tmp_path / SOURCE.name
    source.write_text(text.replace(right, wrong))
    kernels = PackedKernels(HostLaunch(compile_for_host(source, tmp_path), threads=64))
    with pytest.raises(AssertionError):
        _assert_all_sums(kernels)


def _assert_all_sums(kernels: PackedKernels) -> None:
    for kind in ("mxfp4", "fp8 by blocks", "int4 by 32"):
        assert_sums(kernels, MATRICES[kind](4, 136, 1184), tokens=6)
    assert_sums(kernels, MATRICES["int4 by 128"](4, 136, 1280), tokens=6)


def test_without_a_mistake_nothing_is_seen(library: HostLaunch) -> None:
    _assert_all_sums(PackedKernels(library))


@pytest.mark.parametrize("packing", ["mxfp4", "fp8 by blocks", "int4 by 32"])
def test_a_row_has_the_same_bits_in_any_batch(library: HostLaunch, packing: str) -> None:
    """Alone, and in tiles of each width, among rows that are not numbers."""
    matrices, kernels = MATRICES[packing](2, 40, 288), PackedKernels(library)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 288, generator=generator).bfloat16()
    x[1::2] = torch.inf
    alone = torch.cat(
        [
            kernels.multiply(row[None], kernels.plan(torch.ones(1, dtype=torch.int64), 2), matrices, None)
            for row in x[:4:2]
        ]
    )
    for rows in (5, 12, 70):
        plan = kernels.plan(torch.ones(rows, dtype=torch.int64), 2)
        found = kernels.multiply(x[:rows], plan, matrices, None)
        assert torch.equal(found[:4:2], alone)
        assert not found[1::2].isfinite().any()
    assert {kernels.plan(torch.ones(rows, dtype=torch.int64), 2).width for rows in (5, 12, 70)} == {8, 16, 32}
