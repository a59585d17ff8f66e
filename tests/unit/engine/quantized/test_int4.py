"""Weights of 4 bits are as near to the exact ones as their roundings allow, and reading refuses what is amiss.

The bound is derived, not tuned. bfloat16 rounds by at most u = 2^-8 of a number. Scale, zero and weight are each
rounded once: `(8 - zero) scale` is off by u of itself, `(number - zero) scale` by u for its scale and u for the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.attention.flashinfer_workspace import Processors
from shared.engine.checkpoint.model_config import parse_model_config
from shared.engine.cuda.platform import gpu_workspace
from shared.engine.model.weights import Weights
from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.int4 import ByTiles, Int4Products, Tiles, multiplied, scales_and_zeros
from shared.engine.quantized.int4_formats import Int4Format, Packing
from shared.engine.quantized.int4_packings import Int4Weight, joined, packed, take, unpacked
from shared.engine.quantized.linears import NONE, NarrowProducts
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ConfigError, ModelError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.int4_models import INT4_FORMATS, Numbers, numbers_of, tiny_int4

ROUNDED = 2**-8  # what bfloat16 rounds by at most
GPU = Int4Products.on_gpu((9, 0), deterministic=False)
SIZES = [(8, 32), (24, 64), (40, 96), (16, 128), (8, 384), (136, 640)]


def any_numbers(outputs: int, inputs: int, group: int, seed: int = 0) -> Numbers:
    """All numbers and zeros there are, with scales that differ from group to group."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, 17, (outputs, inputs // group), generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator).half() + 0.01
    return Numbers(numbers, zeros, scales)


def weight_of(found: Numbers) -> Int4Weight:
    """As reading makes it."""
    return Int4Weight(packed(found.numbers.byte()), found.scales.float(), found.zeros.byte())


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_weight_is_dequantized_by_its_formula(outputs: int, inputs: int) -> None:
    found = any_numbers(outputs, inputs, 32)
    assert torch.equal(weight_of(found).dequantized(), found.exact)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_what_a_gpu_multiplies_with_is_rounded_where_its_kernel_rounds(outputs: int, inputs: int) -> None:
    found = any_numbers(outputs, inputs, 32)
    weight = weight_of(found)
    made = multiplied(unpacked(weight.values), scales_and_zeros(weight))
    assert torch.equal(made.float(), found.rounded)
    zeros, scales = (each.repeat_interleave(32, 1) for each in (found.zeros, found.scales.double()))
    off = 2 * (found.numbers - zeros).abs() + (8 - zeros).abs()
    bound = off * scales * ROUNDED * (1 + 2 * ROUNDED)
    assert ((made.double() - found.exact).abs() <= bound).all()


def test_large_weights_are_dequantized_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(any_numbers(40, 96, 32))
    whole = multiplied(unpacked(weight.values), scales_and_zeros(weight))
    monkeypatch.setattr("shared.engine.quantized.int4._AT_ONCE", 7 * 96)
    assert torch.equal(multiplied(unpacked(weight.values), scales_and_zeros(weight)), whole)


def tiles_by_hand(numbers: Tensor, lane: int) -> Tensor:
    """What torch's int4mm.cu packs, word by word: two tiles of 16 inputs by 8 outputs in a word of each lane."""
    outputs, inputs = numbers.shape
    found = torch.zeros(outputs // 8, inputs // (16 * lane), 32, lane // 2, dtype=torch.int64)
    for eight, span, thread, word in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        output, first = 8 * eight + thread // 4, span * 16 * lane + word * 32
        places = [first + 8 * pair + 2 * (thread % 4) + odd for odd in (0, 1) for pair in range(4)]
        bits = sum(int(numbers[output, place]) << 4 * number for number, place in enumerate(places))
        found[eight, span, thread, word] = bits if bits < 2**31 else bits - 2**32
    return found.int()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_tiles_are_dequantized_to_the_same_numbers(outputs: int, inputs: int) -> None:
    found = any_numbers(outputs, inputs, 32)
    weight = weight_of(found)
    lane = Tiles.of(on_meta(weight)).words.shape[3] * 2
    tiles = Tiles(tiles_by_hand(found.numbers, lane), scales_and_zeros(weight))
    assert (tiles.shape, tiles.group) == ((outputs, inputs), 32)
    assert torch.equal(tiles.dequantized().float(), found.rounded)


def on_meta(weight: Int4Weight) -> Int4Weight:
    return Int4Weight(*(each.to("meta") for each in (weight.values, weight.scales, weight.zeros)))


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_scales_and_zeros_mean_what_torchs_kernel_on_a_cpu_takes_them_for(group: int) -> None:
    """That kernel rounds elsewhere; a zero of another sense would be off by whole scales."""
    found = any_numbers(64, 512, group)
    weight = weight_of(found)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(found.numbers.int(), 8)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, group, scales_and_zeros(weight))
    ours = Int4Products().linear(weight, None)(x)
    sums = x.double().abs() @ found.exact.double().abs().t() + x.double().abs() @ (
        found.scales.double().repeat_interleave(group, 1).t() * 8
    )
    assert ((ours.double() - theirs.double()).abs() <= 4 * ROUNDED * sums).all()
    assert ((ours.double() - theirs.double()).abs().mean() / theirs.double().abs().mean()) < 2 * ROUNDED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_output_is_the_sum_of_the_rounded_weights_and_a_bias(dtype: torch.dtype) -> None:
    parts = [any_numbers(rows, 128, 64, seed) for seed, rows in enumerate((24, 8, 16))]
    merged = joined([weight_of(part) for part in parts])
    x, bias = torch.randn(9, 128).to(dtype), torch.randn(48).to(dtype)
    weight = torch.cat([part.rounded for part in parts])
    expected = x.double() @ weight.double().t() + bias.double()
    found = Int4Products().linear(merged, bias)(x)
    assert found.dtype == dtype
    sums = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    unit = 2**-23 if dtype == torch.float32 else ROUNDED
    assert ((found.double() - expected).abs() <= 130 * 2**-24 * sums + unit * expected.abs()).all()


# ---- what a device does ----------------------------------------------------------------------------------------------
AWQ_FORM = Int4Format(Packing.AWQ, 128)


def test_deterministic_mode_and_older_gpus_dequantize_for_each_call() -> None:
    assert GPU.by_tiles
    assert not Int4Products.on_gpu((9, 0), deterministic=True).by_tiles
    assert not Int4Products.on_gpu((7, 5), deterministic=False).by_tiles
    assert isinstance(GPU.linear(on_meta(weight_of(any_numbers(8, 32, 32))), None), ByTiles)
    ways = {each.way(AWQ_FORM) for each in (GPU, Int4Products())}
    assert ways == {"int4-awq-128 multiplied", "int4-awq-128 dequantized"}


def test_the_kernel_takes_bfloat16_and_no_other_type() -> None:
    quantization = Quantization(AWQ_FORM)
    able = NarrowProducts.on_gpu((8, 0), deterministic=False)
    with pytest.raises(
        ConfigError, match="int4-awq-128 are multiplied in bfloat16 on cuda, not in float16: set dtype"
    ):
        able.check(quantization, torch.float16)
    able.check(quantization, torch.bfloat16)
    able.check(None, torch.float16)
    NarrowProducts.on_gpu((7, 5), deterministic=False).check(quantization, torch.float16)


def test_memory_is_set_apart_for_the_largest_that_is_dequantized() -> None:
    """In bfloat16, and by torch for some rows while they are made; twice, as graphs have memory of their own."""
    config = PUBLISHED["Qwen3-14B"].config
    plain, quantized = (
        parse_model_config(config | more)
        for more in ({}, {"quantization_config": INT4_FORMATS["awq"].config})
    )
    hopper, able = Processors(132, 9), NarrowProducts.on_gpu((9, 0), deterministic=False)
    for narrow, meanwhile in ((able, 0), (NONE, 7 * 2**24)):
        beside = gpu_workspace(quantized, 64, hopper, narrow) - gpu_workspace(plain, 64, hopper, narrow)
        assert beside == 2 * (2 * 2 * 17408 * 5120 + meanwhile)
    assert able.dequantized_bytes(None, []) == 0


# ---- what is read ----------------------------------------------------------------------------------------------------
DOWN = "model.layers.1.mlp.down_proj"
Damage = Callable[[dict[str, Tensor]], object]


def _drop(name: str) -> Damage:
    return lambda weights: weights.pop(f"{DOWN}.{name}")


def _turned(name: str) -> Damage:
    return lambda weights: weights.update({f"{DOWN}.{name}": weights[f"{DOWN}.{name}"].t().contiguous()})


def _bytes(name: str) -> Damage:
    return lambda weights: weights.update({f"{DOWN}.{name}": weights[f"{DOWN}.{name}"].byte()})


def _scattered(weights: dict[str, Tensor]) -> None:
    weights[f"{DOWN}.g_idx"] = weights[f"{DOWN}.g_idx"].flip(0)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("awq", _drop("qweight"), f"no weight named {DOWN}.qweight,"),
        ("awq", _drop("scales"), f"no weight named {DOWN}.scales,"),
        ("awq", _drop("qzeros"), f"no weight named {DOWN}.qzeros,"),
        ("gptq, sym", _drop("qzeros"), f"no weight named {DOWN}.qzeros,"),
        ("packed", _drop("weight_scale"), f"no weight named {DOWN}.weight_scale,"),
        ("packed, asym", _drop("weight_zero_point"), f"no weight named {DOWN}.weight_zero_point,"),
        (
            "awq",
            _turned("qweight"),
            rf"{DOWN}.qweight should have shape \[384, 16\], has \[16, 384\]",
        ),
        (
            "packed",
            _turned("weight_scale"),
            rf"{DOWN}.weight_scale should have shape \[128, 3\], has \[3, 128\]",
        ),
        ("gptq, asym", _bytes("qweight"), f"{DOWN}.qweight is U8; expected I32, as quantization_config"),
        ("gptq, asym", _scattered, f"{DOWN}.g_idx scatters groups over the inputs .desc_act., which"),
        ("packed", _bytes("weight_scale"), f"{DOWN}.weight_scale is U8; supported are unquantized"),
    ],
)
def test_a_tensor_that_is_amiss_is_named(name: str, damage: Damage, message: str, tmp_path: Path) -> None:
    tiny_int4(name, "llama", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    damage(weights)
    save_file(weights, path)
    with Weights(tmp_path) as opened, pytest.raises(ModelError, match=message) as caught:
        take(opened, format_of(name), DOWN, 128, 384)
    assert "\n" not in str(caught.value)


def test_a_group_of_another_size_than_the_file_has_is_refused(tmp_path: Path) -> None:
    tiny_int4("awq", "llama", tmp_path)
    with (
        Weights(tmp_path) as opened,
        pytest.raises(ModelError, match=rf"{DOWN}.scales should have shape \[3, 128\], has \[6, 128\]"),
    ):
        take(opened, replace(format_of("awq"), group=128), DOWN, 128, 384)


def format_of(name: str) -> Int4Format:
    config = PUBLISHED["Qwen3-0.6B"].config | {"quantization_config": INT4_FORMATS[name].config}
    quantization = parse_model_config(config).quantization
    assert quantization is not None
    assert isinstance(quantization.format, Int4Format)
    return quantization.format


@pytest.mark.parametrize("name", INT4_FORMATS)
def test_each_writers_words_are_read(name: str) -> None:
    """All numbers there are, and zeros from 1 to 15, or 16 where a writer stores one less."""
    form, written = format_of(name), INT4_FORMATS[name]
    group = written.group or 384
    found = any_numbers(16, 384, group)
    zeros = found.zeros.clamp(1, 16 if form.packing is Packing.GPTQ else 15)
    found = replace(found, zeros=torch.full_like(zeros, 8) if written.symmetric else zeros)

    class Source:
        def __contains__(self, name: str) -> bool:
            return name.removeprefix("a.") in stored

        def take(
            self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None
        ) -> Tensor:
            assert part is None
            tensor = stored[name.removeprefix("a.")].to(dtype)
            assert tensor.shape == shape
            return tensor

    stored = written.write(found)
    weight = take(Source(), form, "a", 16, 384)
    assert torch.equal(weight.dequantized(), found.exact)
    assert weight.group == form.kept_group(384) in (32, 64, 128)


def test_numbers_of_a_tiny_model_use_all_there_are() -> None:
    made = numbers_of(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)), 32, symmetric=False)
    assert set(made.numbers.flatten().tolist()) == set(range(16))
    assert len(set(made.zeros.flatten().tolist())) > 3
