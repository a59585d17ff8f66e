"""Inputs rounded to 8 bits: the CUDA source, run on this CPU, does what plain torch does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine.cuda.kernels.fp8_inputs import SOURCE, CudaRounding
from shared.engine.quantized.fp8 import LARGEST, TorchRounding
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host

PLAIN = TorchRounding()


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> CudaRounding:
    return CudaRounding(HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("fp8"))))


def numbers(rows: int, size: int) -> Tensor:
    """Rows of different sizes, one of zeros, and some numbers that are none."""
    generator = torch.Generator().manual_seed(rows + size)
    x = torch.randn(rows, size, generator=generator) * torch.randn(rows, 1, generator=generator).mul(8).exp2()
    x[rows // 2] = 0
    if rows > 4:
        x[1, 3], x[3, 5] = torch.nan, -torch.inf
    return x.bfloat16()


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Values and scales; a number that is none may be so with either sign."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert [step for step, size in zip(ours.stride(), ours.shape, strict=True) if size > 1] == [
            step for step, size in zip(theirs.stride(), theirs.shape, strict=True) if size > 1
        ]
        ours, theirs = (each.float() for each in (ours, theirs))
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0))


def check(rounding: CudaRounding) -> None:
    """All that a rounding promises."""
    for rows, size in ((1, 128), (4, 384), (9, 2560), (6, 4224), (64, 2048)):
        x = numbers(rows, size)
        assert_same(rounding.blocks(x), PLAIN.blocks(x))
        assert_same(rounding.rows(x), PLAIN.rows(x))
        scale = torch.tensor(0.7 / LARGEST)
        assert_same(rounding.rows(x, scale), PLAIN.rows(x, scale))
    apart = numbers(7, 512)[:, 128:384]
    assert_same(rounding.blocks(apart), PLAIN.blocks(apart.contiguous()))
    assert_same(rounding.rows(numbers(5, 16)), PLAIN.rows(numbers(5, 16)))


def test_inputs_are_rounded_as_torch_rounds_them(rounding: CudaRounding) -> None:
    check(rounding)


def test_rows_that_begin_anywhere_are_read(rounding: CudaRounding) -> None:
    x = numbers(6, 400)[:, 3:387]
    assert_same(rounding.rows(x), PLAIN.rows(x.contiguous()))


def test_no_rows_are_no_rows(rounding: CudaRounding) -> None:
    for found in (rounding.rows, rounding.blocks):
        values, _ = found(torch.empty(0, 256).bfloat16())
        assert values.shape == (0, 256)


MISTAKES = {
    "a scale is half a row's": (
        "i += blockDim.x * EACH)\n      largest",
        "i += 2 * blockDim.x * EACH)\n      largest",
    ),
    "a warp's largest is left out": ("warp < warps;", "warp < warps - 1;"),
    "lanes of half a block share a scale": (
        "largest_of(numbers, 0), LANES)",
        "largest_of(numbers, 0), LANES / 2)",
    ),
    "signs count": ("bits & 0x7fff", "bits & 0xffff"),
    "a row of zeros is divided by nothing": ("size < SMALLEST ? SMALLEST : size", "size"),
    "what is given is not taken": ("if (given) {", "if (false) {"),
    "scales lie row by row": ("(i64)block * padded + row]", "row * blocks + block]"),
    "rows behind the last are read": ("if (row < rows) numbers", "if (row < rows + 1) numbers"),
    "numbers change places": ("narrow_four(numbers.of + 4", "narrow_four(numbers.of"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_source_is_seen(mistake: str, tmp_path: Path) -> None:
    text, (right, wrong) = SOURCE.read_text(), MISTAKES[mistake]
    assert right in text
    for header in SOURCE.parent.glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = tmp_path / SOURCE.name
    source.write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError):
        check(CudaRounding(HostLaunch(compile_for_host(source, tmp_path))))
