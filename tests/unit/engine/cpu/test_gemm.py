"""The compiled product of rows and a matrix: right, and for each row the same bits whatever rows come with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shared.engine.gguf.packing import Kind, block_inputs, unpack
from tests.unit.engine.driver import COMPILED_KERNELS, skip_unless_runnable
from tests.unit.engine.product import KINDS, Product, packed_weight

OUTPUTS, BLOCKS = 200, 3  # partial panels
ROWS_MAX = 121  # one more than a block of rows
ROWS = (*range(1, 65), 119, 120, ROWS_MAX)


@pytest.fixture(scope="module", params=COMPILED_KERNELS)
def product(request: pytest.FixtureRequest) -> Iterator[Product]:
    skip_unless_runnable(request.param)
    product = Product(request.param, threads=2)
    yield product
    product.close()


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_any_others(product: Product, kind: Kind, biased: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = BLOCKS * block_inputs(kind)
    packed = packed_weight(kind, OUTPUTS, inputs, generator)
    x = torch.randn(ROWS_MAX, inputs, generator=generator)
    bias = torch.randn(OUTPUTS, generator=generator) if biased else None
    alone = torch.cat([product(x[row : row + 1], kind, packed, OUTPUTS, bias) for row in range(ROWS_MAX)])
    weight = unpack(kind, packed, OUTPUTS, inputs)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (alone - exact).abs().max() < 1e-5 * exact.abs().max()
    for rows in ROWS:
        assert torch.equal(product(x[:rows], kind, packed, OUTPUTS, bias), alone[:rows]), rows
        last = x[-rows:].contiguous()
        assert torch.equal(product(last, kind, packed, OUTPUTS, bias), alone[-rows:]), rows
