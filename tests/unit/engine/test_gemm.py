"""The compiled product of rows and a matrix: right, and for each row the same bits whatever rows come with it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shared.engine.native import kernels
from shared.engine.native.build import build, choose
from shared.engine.native.decoder import KIND_NUMBERS
from shared.engine.native.kernels import Kernels
from shared.engine.packing import BLOCK_FORMATS, BLOCK_INPUTS, Kind, pack_blocks, pack_float, unpack
from tests.unit.engine.driver import COMPILED_KERNELS, skip_unless_runnable

OUTPUTS, INPUTS = 200, 96  # partial panels; three blocks
ROWS_MAX = 121  # one more than a block of rows
ROWS = (*range(1, 65), 119, 120, ROWS_MAX)
KINDS: tuple[Kind, ...] = ("f32", "q4_0", "q4_1", "q8_0")


class Product:
    """y = x · Wᵀ + b by compiled kernels."""

    def __init__(self, name: str, threads: int):
        self.library = Kernels(build(choose(name)))
        shape = kernels.Shape()
        self.decoder = self.library.decoder_new(ctypes.byref(shape), (kernels.Layer * 1)(), 0, threads)

    def close(self) -> None:
        self.library.decoder_delete(self.decoder)

    def __call__(self, x: Tensor, kind: Kind, packed: Tensor, bias: Tensor | None) -> Tensor:
        matrix = kernels.Matrix(
            kind=KIND_NUMBERS[kind],
            outputs=OUTPUTS,
            inputs=INPUTS,
            panels=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )
        y = torch.full((len(x), OUTPUTS), torch.nan)
        self.library.gemm(self.decoder, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr())
        return y


@pytest.fixture(scope="module", params=COMPILED_KERNELS)
def product(request: pytest.FixtureRequest) -> Iterator[Product]:
    skip_unless_runnable(request.param)
    product = Product(request.param, threads=2)
    yield product
    product.close()


def packed_weight(kind: Kind, generator: torch.Generator) -> Tensor:
    """A random matrix of this kind. Scales are small numbers: bytes at random could be no numbers at all."""
    if kind == "f32":
        return pack_float(torch.randn(OUTPUTS, INPUTS, generator=generator))
    block = BLOCK_FORMATS[kind]
    halves = torch.rand(OUTPUTS, INPUTS // BLOCK_INPUTS, block.halves, generator=generator) - 0.5
    quants = torch.randint(
        256, (*halves.shape[:2], block.quant_bytes), dtype=torch.uint8, generator=generator
    )
    blocks = torch.cat([halves.half().view(torch.uint8), quants], dim=2)
    return pack_blocks(kind, blocks.view(OUTPUTS, -1))


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_others(product: Product, kind: Kind, biased: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    packed = packed_weight(kind, generator)
    x = torch.randn(ROWS_MAX, INPUTS, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator) if biased else None
    alone = torch.cat([product(x[row : row + 1], kind, packed, bias) for row in range(ROWS_MAX)])
    weight = unpack(kind, packed, OUTPUTS, INPUTS)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (alone - exact).abs().max() < 1e-5 * exact.abs().max()
    for rows in ROWS:
        assert torch.equal(product(x[:rows], kind, packed, bias), alone[:rows]), rows
        last = x[-rows:].contiguous()
        assert torch.equal(product(last, kind, packed, bias), alone[-rows:]), rows
