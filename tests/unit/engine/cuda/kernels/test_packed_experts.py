"""Products of packed experts: the CUDA source, run on this CPU, reads each number exactly, and sums for its row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.engine.cuda.kernels.packed_experts import (
    MANY_SOURCE,
    MANY_WIDTHS,
    SOURCE,
    WIDTHS,
    PackedKernels,
    tiles_max,
    width_of,
)
from shared.engine.quantized.packed_matrices import PackedFormat, unpack
from tests.unit.engine.experts.packed_banks import (
    MATRICES,
    assert_exact,
    assert_sums,
    every_code,
    host_kernels,
    weights_of,
)

# inputs and outputs: a part of a span, whole spans, a last turn that some warps lack, outputs left
SHAPES = ((32, 8), (96, 40), (128, 32), (1184, 33))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed_experts")


@pytest.fixture(scope="module")
def kernels(libraries: Path) -> PackedKernels:
    return host_kernels(libraries)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("rows", "experts"), [(1, 5), (40, 1), (64, 7), (300, 128), (2000, 33), (9, 1024)])
def test_rows_are_sorted_by_expert_and_cut_into_tiles(
    kernels: PackedKernels, rows: int, experts: int, many: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, -(-experts // 2), (rows,), generator=generator)  # half of them nobody chooses
    plan = kernels.plan(chosen, experts, many=many)
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
            for width in (8, 16, 32, 64):
                lonely = min(experts, rows)  # one row each, and all the others of one expert
                assert lonely - 1 + -(-(rows - lonely + 1) // width) <= tiles_max(rows, experts, width)


def test_rows_of_experts_elsewhere_are_in_no_tile(kernels: PackedKernels) -> None:
    chosen = torch.tensor([2, 0, 2, 1, 2, 0])
    plan = kernels.plan(chosen, 2)
    assert plan.order[:3].tolist() == [1, 5, 3]
    assert plan.tiles.tolist() == [[0, 0, 2], [1, 2, 1]]


def test_tiles_are_wider_where_experts_have_more_rows() -> None:
    assert [width_of(rows, 32) for rows in (1, 128, 129, 256, 257, 10_000)] == [8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MATRICES)
def test_unpacked_numbers_are_the_references_bit_for_bit(
    kernels: PackedKernels, kind: str, shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    matrices = MATRICES[kind](3, outputs, inputs)
    wanted = weights_of(matrices).bfloat16()
    for first, rows in ((0, outputs), (3, outputs - 5)):
        found, beside = torch.full((2, 3, rows, inputs), torch.nan).bfloat16()
        kernels.unpack(matrices, first, found)
        assert torch.equal(found, wanted[:, first : first + rows])
        unpack(matrices, first, beside)
        assert torch.equal(found, beside)


TILES = [(width, False) for width in WIDTHS] + [(width, True) for width in MANY_WIDTHS]


@pytest.mark.parametrize(("width", "many"), TILES)
@pytest.mark.parametrize("packing", PackedFormat)
def test_every_code_and_scale_is_multiplied_exactly(
    kernels: PackedKernels, packing: PackedFormat, width: int, many: bool
) -> None:
    assert_exact(kernels, every_code(packing), width, many=many)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MATRICES)
def test_products_are_sums_of_float32_rounded_once(
    kernels: PackedKernels, kind: str, shape: tuple[int, int], many: bool
) -> None:
    inputs, outputs = shape
    assert_sums(kernels, MATRICES[kind](4, outputs, inputs), tokens=6, many=many)


def test_rows_are_weighed_in_float32_and_rounded_once(kernels: PackedKernels) -> None:
    """A row of weight 0 is no number: its expert is on another rank."""
    generator = torch.Generator().manual_seed(3)
    rows, weights = (
        torch.randn(10, 2, 72, generator=generator).bfloat16(),
        torch.rand(10, 2, generator=generator),
    )
    weights[3, 1] = 0
    wanted = (rows.double() * weights.unsqueeze(2)).sum(1)
    rows[3, 1] = torch.nan
    found = kernels.weigh(rows.view(20, 72), weights).double()
    assert ((found - wanted).abs() <= 2**-8 * wanted.abs() + 2**-22).all()


MISTAKES = {
    "a number of x is another": ("words.of[step + 2], 0x5410u", "words.of[step + 2], 0x7632u"),
    "a neighbour in x is another": ("? words.of[2 * step + 1]", "? words.of[2 * step]"),
    "a number of 8 bits is its neighbour's": ("i % 2 ? 0x3020u : 0x1000u", "i % 2 ? 0x1000u : 0x3020u"),
    "signs are lost": ("(codes & 0x80008000u) | ((codes >> 6)", "((codes >> 6)"),
    "signs of 8 bits are lost": ("(codes & 0x80008000u) | ((codes >> 4)", "((codes >> 4)"),
    "scales are twice as large": ("[place] + 106", "[place] + 107"),
    "a scale is its neighbour's": ("+ (at[ahead] >> chunks", "+ ((at[ahead] ^ 1) >> chunks"),
    "a scale is that of the first block": ("span < last_span ? span : last_span", "0"),
    "a scale is that of the first rows": ("output / bank.scale_rows;", "0;"),
    "what lies behind the end counts": ("b[step][c][i] &= mask[ahead]", "b[step][c][i] &= ~0u"),
    "a warp's part is left out": ("part < WARPS;", "part < WARPS - 1;"),
    "a bias is another expert's": ("bias[(i64)expert *", "bias[(i64)(expert ^ 1) *"),
    "a weight is another expert's": (
        "(i64)expert * bank.outputs + (output",
        "(i64)(expert ^ 1) * bank.outputs + (output",
    ),
    "many: a weight is another expert's": (
        "(i64)expert * bank.outputs + output_of",
        "(i64)(expert ^ 1) * bank.outputs + output_of",
    ),
    "many: x is read where it was": ("(wanted ? span * SPAN : 0)", "0"),
    "many: what lies behind the end counts": ("+ chunk_of_unit < chunks", "+ chunk_of_unit < chunks + 1"),
    "many: rows come too early to where others lie": ("staged[span % 2][row][place", "staged[0][row][place"),
    "many: a span's scale is that of the one before": (
        "scale_of(bank, expert, output_of(side, half), span)",
        "scale_of(bank, expert, output_of(side, half), span ? span - 1 : 0)",
    ),
    "many: sums of spans are not scaled": ("Format::SCALED_SUMS ? of_span : sums;", "sums;"),
    "many: a bias is another output's": (
        "bank.outputs + output]) : 0.0f",
        "bank.outputs + (output ^ 1)]) : 0.0f",
    ),
    "many: a row is another's": ("+ chunk_of_lane * 2 + i]", "+ chunk_of_lane * 2 + (i ^ 1)]"),
    "many: a row is written to its place in the order": (
        "y[(i64)order[first + row] * bank.outputs + output] = found",
        "y[(i64)(first + row) * bank.outputs + output] = found",
    ),
    "a number of 4 bits is its neighbour's": ("4 * (i ^ 1)", "4 * i"),
    "a zero is left out": ("{scale.bits * TWICE, zero.bits * TWICE}", "{scale.bits * TWICE, NOTHING}"),
    "a zero is of another group": ("bank.zeros[place]", "bank.zeros[place ^ 1]"),
    "groups are of another size": ("<< log2 <", "<< log2 + 1 <"),
    "x is another token's": ("row : 0)] / chosen * x_stride", "row : 0)] / chosen * 0"),
    "a row is written to its place in the order": ("y[(i64)order[first + row] *", "y[(i64)(first + row) *"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("kernels")
def test_a_mistake_in_the_source_is_seen(mistake: str, libraries: Path, tmp_path: Path) -> None:
    right, wrong = MISTAKES[mistake]
    texts = [each.read_text() for each in (SOURCE, MANY_SOURCE, SOURCE.with_name("packed_formats.cuh"))]
    assert any(right in text for text in texts)
    with pytest.raises(AssertionError):
        _assert_all_sums(
            host_kernels(tmp_path, right, wrong, libraries), many_first=mistake.startswith("many: ")
        )


def _assert_all_sums(kernels: PackedKernels, *, many_first: bool = False) -> None:
    for many in (many_first, not many_first):
        for kind in ("mxfp4", "fp8 by blocks", "int4 by 32"):
            assert_sums(kernels, MATRICES[kind](4, 136, 1184), tokens=6, many=many)
        assert_sums(kernels, MATRICES["int4 by 128"](4, 136, 1280), tokens=6, many=many)


def test_without_a_mistake_nothing_is_seen(kernels: PackedKernels) -> None:
    _assert_all_sums(kernels)


@pytest.mark.parametrize("packing", ["mxfp4", "fp8 by blocks", "int4 by 32"])
def test_a_row_has_the_same_bits_in_any_batch(kernels: PackedKernels, packing: str) -> None:
    """Alone, and in tiles of each width, among rows that are not numbers."""
    matrices = MATRICES[packing](2, 40, 288)
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


@pytest.mark.parametrize("packing", ["mxfp4", "fp8 by blocks", "int4 by 32"])
def test_a_row_has_the_same_bits_in_any_wide_tile(kernels: PackedKernels, packing: str) -> None:
    """Of either width, among rows that are not numbers."""
    matrices, generator = MATRICES[packing](2, 40, 288), torch.Generator().manual_seed(1)
    x = torch.randn(150, 288, generator=generator).bfloat16()
    x[1::2] = torch.inf
    found = []
    for rows in (20, 150):
        plan = kernels.plan(torch.ones(rows, dtype=torch.int64), 2, many=True)
        found.append(kernels.multiply(x[:rows], plan, matrices, None))
        assert plan.width == (32 if rows == 20 else 64)
        assert not found[-1][1::2].isfinite().any()
    assert torch.equal(found[0][::2], found[1][:20:2])
