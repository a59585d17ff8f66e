"""Weights of 4 bits from tiles: the CUDA source, run on this CPU, does what torch does, bit for bit."""

from __future__ import annotations

import pytest
import torch

from shared.engine.cuda.int4_tiles import SOURCE, CudaTiles
from shared.engine.quantized.int4 import FEW_ROWS, ByTiles, Int4Products, Tiles, scales_and_zeros
from tests.unit.engine.cuda.host_kernels import HostLaunch, compile_for_host
from tests.unit.engine.quantized.test_int4 import SIZES, any_numbers, on_meta, tiles_by_hand, weight_of

GROUPED = [(*size, group) for size in SIZES for group in (32, 64, 128) if size[1] % group == 0]


@pytest.fixture(scope="module")
def dequantize(tmp_path_factory: pytest.TempPathFactory) -> CudaTiles:
    return CudaTiles(HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("int4"))))


@pytest.mark.parametrize(("outputs", "inputs", "group"), GROUPED)
def test_weights_are_those_of_torch(dequantize: CudaTiles, outputs: int, inputs: int, group: int) -> None:
    found = any_numbers(outputs, inputs, group, seed=inputs)
    weight = weight_of(found)
    lane = Tiles.of(on_meta(weight)).words.shape[3] * 2
    tiles = Tiles(tiles_by_hand(found.numbers, lane), scales_and_zeros(weight))
    made = dequantize(tiles)
    assert torch.equal(made, tiles.dequantized())
    assert torch.equal(made.float(), found.rounded)


def test_many_rows_are_multiplied_with_what_the_kernel_makes(dequantize: CudaTiles) -> None:
    found = any_numbers(24, 128, 32)
    weight = weight_of(found)
    tiles = Tiles(tiles_by_hand(found.numbers, 8), scales_and_zeros(weight))
    linear = ByTiles(tiles, None, dequantize)
    x = torch.randn(FEW_ROWS + 1, 128).bfloat16()
    assert torch.equal(linear(x), Int4Products().linear(weight, None)(x))
