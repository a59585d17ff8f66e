"""Weights of 4 bits from tiles: the CUDA source, run on this CPU, does what torch does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.engine.cuda.kernels.int4_tiles import SOURCE, CudaTiles
from shared.engine.quantized.int4 import FEW_ROWS, ByTiles, Int4Products, Tiles, scales_and_zeros
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_either_way_gives_the_product_and_the_bias(
    dequantize: CudaTiles, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernel is a GPU's: its double here multiplies with the same weights, in float32."""
    found = any_numbers(24, 128, 32)
    weight, bias = weight_of(found), torch.randn(24).bfloat16() if biased else None
    tiles = Tiles(tiles_by_hand(found.numbers, 8), scales_and_zeros(weight))
    asked: list[int] = []

    def few_rows(x: Tensor, tiles: Tiles) -> Tensor:
        asked.append(len(x))
        return (x.float() @ tiles.dequantized().float().t()).bfloat16()

    monkeypatch.setattr("shared.engine.quantized.int4.few_rows", few_rows)
    x = torch.randn(rows, 128).bfloat16()
    y, wanted = ByTiles(tiles, bias, dequantize)(x), Int4Products().linear(weight, bias)(x)
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-4)
    assert asked == ([rows] if rows <= FEW_ROWS else [])
