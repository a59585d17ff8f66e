"""Products in 8 bits are as near to the exact one as the rounding of inputs allows, and reading refuses what is amiss.

The bound is derived, not tuned. e4m3 has three bits of fraction: a normal number is rounded by at most 2^-4 of itself,
and one below 2^-6 by at most 2^-10, both before the scale. So an output, a sum of |weight| · |error of its input|, is
off by at most |W| · max(2^-4 |x|, 2^-10 scale). What is left is float32 arithmetic, and the type of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.engine.attention.flashinfer_workspace import Processors
from shared.engine.checkpoint.model_config import parse_model_config, read_model_config
from shared.engine.cuda.platform import gpu_workspace
from shared.engine.model.ops import Linear
from shared.engine.model.weights import Weights
from shared.engine.quantized.formats import Quantization
from shared.engine.quantized.fp8 import (
    E4M3,
    LARGEST,
    ON_HOST,
    SMALLEST,
    ByBlocks,
    Fp8Products,
    Fp8Weight,
    joined,
    rounded,
    rounded_by_blocks,
    take,
)
from shared.engine.quantized.fp8_formats import Fp8Format, Scales
from shared.engine.quantized.linears import NONE, NarrowProducts, dequantized
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ConfigError, ModelError
from tests.doubles.no_sync import no_sync
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.fp8_models import FORMATS, tiny_fp8

FORMS = [Fp8Format(scales, static) for scales in Scales for static in (False, True)][:-1]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of a result's type, with its sums
QKV = ((96, 1.0), (40, 8.0), (40, 0.1))  # rows of parts, and how large their numbers are


def part(form: Fp8Format, rows: int, size: float, inputs: int, seed: int) -> Fp8Weight:
    """A weight whose scales differ from row to row, or block to block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(rows, inputs).uniform_(-LARGEST, LARGEST, generator=generator).to(E4M3)
    columns = -(-inputs // 128) if form.scales is Scales.BLOCK else 1
    scales = torch.empty(rows, columns).uniform_(0.5, 2.0, generator=generator) * size / LARGEST
    if form.scales is Scales.TENSOR:
        scales = scales[:1].expand(rows, 1)
    if form.scales is Scales.BLOCK:
        scales = scales[:1].expand(rows, -1)
    input_scale = torch.tensor(0.02 * size) if form.static_inputs else None
    return Fp8Weight(values, scales, input_scale, form.scales is Scales.BLOCK, whole=True)


def parts(form: Fp8Format, inputs: int = 272, sizes: Sequence[tuple[int, float]] = QKV) -> list[Fp8Weight]:
    return [part(form, rows, size, inputs, seed) for seed, (rows, size) in enumerate(sizes)]


def tokens(inputs: int, dtype: torch.dtype = torch.float32, rows: int = 9) -> Tensor:
    """Rows of different sizes, one of nine zero, with outliers."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(5))
    x[:, 7] *= 30
    x *= torch.logspace(-3, 1, rows).unsqueeze(1)
    x[4::9] = 0.0
    return x.to(dtype)


def off(linear: Linear, exact: Fp8Weight, x: Tensor, *, rounds: bool) -> float:
    """The largest error of an output, of what it may be. `rounds`: inputs are rounded by row, or by 128 of a row."""
    weight = exact.dequantized().double()
    wide = x.double()
    found = linear(x).double()
    error = torch.zeros_like(wide)
    if rounds:
        together = wide.view(len(x), -1, 128) if exact.blocks else wide.unsqueeze(1)
        largest = together.abs().amax(2, keepdim=True).expand_as(together).reshape(wide.shape)
        scale = largest / LARGEST if exact.input_scale is None else exact.input_scale.double()
        beyond = (wide.abs() - LARGEST * scale).clamp(min=0)  # of a static scale
        error = torch.maximum(wide.abs() * 2**-4, scale * 2**-10).maximum(beyond)
    sums = wide.abs() @ weight.abs().t()
    bound = error @ weight.abs().t() + ROUNDING[x.dtype] * sums + SMALLEST
    return float(((found - wide @ weight.t()).abs() / bound).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_output_is_as_near_as_the_rounding_of_its_inputs_allows(
    form: Fp8Format, dtype: torch.dtype
) -> None:
    merged = joined(parts(form))
    rounds, linear, x = form.scales is not Scales.BLOCK, ON_HOST.linear(merged, None), tokens(272, dtype)
    assert off(linear, merged, x, rounds=rounds) <= 1
    if dtype == torch.float32:
        assert (off(linear, merged, x, rounds=False) > 1) == rounds, "inputs are rounded"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "mistake", ["a scale of another part", "a scale that divides", "the next row's scale"]
)
def test_a_wrong_scale_is_far_beyond_the_bound(form: Fp8Format, mistake: str) -> None:
    q, k, v = parts(form)
    exact = joined([q, k, v])
    if mistake == "a scale of another part":
        wrong = joined([q, replace(k, scales=v.scales), replace(v, scales=k.scales)])
    elif mistake == "a scale that divides":
        wrong = replace(exact, scales=1 / exact.scales)
    else:
        wrong = replace(exact, scales=exact.scales.roll(96, dims=0))
    rounds = form.scales is not Scales.BLOCK
    assert off(ON_HOST.linear(wrong, None), exact, tokens(272), rounds=rounds) > 3


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_bias_is_added(form: Fp8Format) -> None:
    merged, x = joined(parts(form)), tokens(272)
    bias = torch.randn(176)
    without = ON_HOST.linear(merged, None)(x)
    torch.testing.assert_close(ON_HOST.linear(merged, bias)(x), without + bias, rtol=1e-5, atol=1e-5)


def test_a_token_of_zeros_stays_zero_and_infinity_is_not_hidden() -> None:
    values, scales = rounded(torch.tensor([[0.0, 0.0], [1.0, torch.inf], [torch.nan, 1.0]]))
    assert values[0].float().tolist() == [0.0, 0.0]
    assert torch.isfinite(scales[0]).all()
    product = values.float() * scales
    assert not torch.isfinite(product[1:]).all(dim=1).any()


def test_with_a_static_scale_what_is_beyond_it_is_the_largest() -> None:
    values, scales = rounded(torch.tensor([[1.0, -1000.0]]), torch.tensor(1 / LARGEST))
    assert (values.float() * scales).tolist() == [[1.0, -1.0]]


# ---- by blocks: the kernel is a GPU's; torch checks sizes and strides of scales on its meta device -------------------
GPU = Fp8Products.on_gpu((9, 0), deterministic=False)
BY_BLOCK = Fp8Format(Scales.BLOCK)


def on_meta(rows: tuple[int, ...], inputs: int) -> Linear:
    made = [part(BY_BLOCK, each, 1.0, inputs, 0) for each in rows]
    merged = joined(made)
    return GPU.linear(replace(merged, values=merged.values.to("meta"), scales=merged.scales.to("meta")), None)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 200])
@pytest.mark.parametrize("inputs", [128, 384, 512, 1280])
@pytest.mark.parametrize("outputs", [(256, 128), (128,)], ids=str)
def test_the_kernel_of_blocks_gets_scales_as_it_reads_them(
    rows: int, inputs: int, outputs: tuple[int, ...]
) -> None:
    """Four rows at a time, and four blocks of inputs: what cuBLASLt computes wrongly otherwise, torch refuses here."""
    linear = on_meta(outputs, inputs)
    assert isinstance(linear, ByBlocks)
    with no_sync(), torch.inference_mode():
        found = linear(torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta"))
    assert (found.shape, found.dtype) == ((rows, sum(outputs)), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "inputs"), [((96, 128), 256), ((128,), 192), ((136,), 256), ((128, 24), 256)], ids=str
)
def test_weights_that_the_kernel_of_blocks_cannot_read_are_dequantized(
    rows: tuple[int, ...], inputs: int
) -> None:
    """Parts that share a block with others, inputs that are not whole blocks, outputs that are no multiple of 16."""
    assert not isinstance(on_meta(rows, inputs), ByBlocks)


def test_inputs_of_blocks_are_rounded_with_a_scale_for_each_128_numbers() -> None:
    """What the kernel computes, in float32, keeps the bound that a GPU is held to. One scale a row would not."""
    signed = joined(parts(BY_BLOCK, 384))
    exact = replace(signed, values=signed.values.float().abs().to(E4M3))  # errors of one sign add up
    exact.values[:, 256:] = 0  # so that only numbers count that are small beside those behind them
    x = tokens(384).abs() * torch.tensor([1e-6, 1e-6, 1.0]).repeat_interleave(128)
    assert [each.shape for each in rounded_by_blocks(x)] == [(9, 384), (9, 3)]

    def by_blocks(x: Tensor) -> Tensor:
        values, scales = rounded_by_blocks(x)
        return values.float() * scales.repeat_interleave(128, dim=1) @ exact.dequantized().t()

    def by_rows(x: Tensor) -> Tensor:
        values, scales = rounded(x)
        return values.float() * scales @ exact.dequantized().t()

    assert off(by_blocks, exact, x, rounds=True) <= 1
    assert off(by_blocks, exact, x, rounds=False) > 1
    assert off(by_rows, exact, x, rounds=True) > 1


def test_blocks_of_a_joined_weight_are_those_of_its_parts() -> None:
    merged = joined([part(BY_BLOCK, 256, 1.0, 300, 1), part(BY_BLOCK, 130, 2.0, 300, 2)])
    assert merged.whole
    weight = merged.dequantized()
    for row in (0, 127, 128, 255, 256, 383, 385):
        for column in (0, 127, 128, 255, 256, 299):
            scale = merged.scales[row, column // 128]
            assert weight[row, column] == merged.values[row, column].float() * scale


def test_deterministic_mode_and_older_gpus_have_no_kernel() -> None:
    assert Fp8Products.on_gpu((9, 0), deterministic=True) == Fp8Products()
    assert Fp8Products.on_gpu((8, 0), deterministic=False) == Fp8Products(step=16)
    ada, blackwell = ((Fp8Products.on_gpu(each, deterministic=False)) for each in ((8, 9), (10, 0)))
    assert (ada.by_rows, ada.by_blocks) == (blackwell.by_rows, blackwell.by_blocks) == (True, False)
    assert len({each.way(form) for each in (GPU, Fp8Products()) for form in FORMS}) == 2 * len(FORMS)


def test_kernels_give_bfloat16_and_no_other_type() -> None:
    channel = Quantization(Fp8Format(Scales.CHANNEL))
    with pytest.raises(
        ConfigError, match="fp8-channel are multiplied in bfloat16 on cuda, not in float16: set dtype"
    ):
        GPU.check(channel, torch.float16)
    GPU.check(channel, torch.bfloat16)
    GPU.check(None, torch.float16)
    Fp8Products.on_gpu((8, 0), deterministic=False).check(channel, torch.float16)
    ON_HOST.check(channel, torch.float32)


@pytest.mark.parametrize(
    ("name", "products", "numbers"),
    [
        ("channel", GPU, 0),
        ("block", GPU, 0),
        ("block", Fp8Products.on_gpu((8, 9), deterministic=False), 2 * 17408 * 5120),
        ("channel", Fp8Products(), 2 * 17408 * 5120),
    ],
    ids=str,
)
def test_memory_is_set_apart_for_the_largest_that_is_dequantized(
    name: str, products: Fp8Products, numbers: int
) -> None:
    config = PUBLISHED["Qwen3-14B"].config
    assert products.dequantized_bytes(None, []) == 0
    quantized = parse_model_config(config | {"quantization_config": FORMATS[name].config})
    assert products.dequantized_bytes(quantized.quantization, quantized.linears()) == 6 * numbers


def test_a_graph_dequantizes_into_memory_of_its_own() -> None:
    config = PUBLISHED["Qwen3-14B"].config
    plain, quantized = (
        parse_model_config(config | more) for more in ({}, {"quantization_config": FORMATS["block"].config})
    )
    hopper, able = Processors(132, 9), NarrowProducts.on_gpu((9, 0), deterministic=False)
    beside = gpu_workspace(quantized, 64, hopper, NONE) - gpu_workspace(plain, 64, hopper, NONE)
    assert beside == 2 * 6 * 2 * 17408 * 5120
    assert gpu_workspace(quantized, 64, hopper, able) == gpu_workspace(plain, 64, hopper, able)


# ---- what is read ----------------------------------------------------------------------------------------------------
DOWN = "model.layers.1.mlp.down_proj"


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(f"{DOWN}.{name}")


def _turned(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({f"{DOWN}.{name}": weights[f"{DOWN}.{name}"].t().contiguous()})


def _in_16_bits(weights: dict[str, Tensor]) -> None:
    weights[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"].bfloat16()


def _in_eight_bits(weights: dict[str, Tensor]) -> None:
    weights[f"{DOWN}.weight_scale"] = weights[f"{DOWN}.weight_scale"].to(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("channel", _drop("weight_scale"), f"no weight named {DOWN}.weight_scale,"),
        ("block", _drop("weight_scale_inv"), f"no weight named {DOWN}.weight_scale_inv,"),
        ("AutoFP8, static", _drop("input_scale"), f"no weight named {DOWN}.activation_scale,"),
        ("tensor, static", _drop("input_scale"), f"no weight named {DOWN}.input_scale,"),
        (
            "channel",
            _turned("weight_scale"),
            rf"{DOWN}.weight_scale should have shape \[72, 1\], has \[1, 72\]",
        ),
        (
            "block",
            _turned("weight_scale_inv"),
            rf"{DOWN}.weight_scale_inv should have shape \[1, 9\], has \[9, 1\]",
        ),
        ("channel", _in_16_bits, f"{DOWN}.weight is BF16; expected F8_E4M3, as quantization_config"),
        ("channel", _in_eight_bits, f"{DOWN}.weight_scale is F8_E5M2; supported are unquantized"),
    ],
)
def test_a_tensor_that_is_amiss_is_named(
    name: str, damage: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    tiny_fp8(name, "llama, biases, llama3 rope, inner size 1100", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    damage(weights)
    save_file(weights, path)
    written = FORMATS[name]
    scales = {"channel": Scales.CHANNEL, "block": Scales.BLOCK}.get(name, Scales.TENSOR)
    form = Fp8Format(
        scales,
        written.input_scale_name is not None,
        (written.scale_name,),
        ("activation_scale", "input_scale") if "Auto" in name else ("input_scale",),
    )
    with Weights(tmp_path) as opened, pytest.raises(ModelError, match=message):
        take(opened, form, DOWN, 72, 1100)


PARTS = [
    ("up_proj", (1100, 72), Part(3, 200)),
    ("up_proj", (1100, 72), Part(128, 1100)),
    ("down_proj", (72, 1100), Part(3, 60)),
    ("down_proj", (72, 1100), Part(256, 300, dim=1)),
    ("down_proj", (72, 1100), Part(128, 1100, dim=1)),
]


@pytest.mark.parametrize(("linear", "shape", "cut"), PARTS, ids=str)
@pytest.mark.parametrize("name", ["channel", "block", "AutoFP8, static", "tensor, static"])
def test_a_part_has_the_scales_of_its_own_rows_and_blocks(
    name: str, linear: str, shape: tuple[int, int], cut: Part, tmp_path: Path
) -> None:
    tiny_fp8(name, "llama, biases, llama3 rope, inner size 1100", tmp_path)
    quantization, weight = read_model_config(tmp_path).quantization, f"model.layers.1.mlp.{linear}.weight"
    with Weights(tmp_path) as opened:
        source = dequantized(opened, quantization)
        whole = source.take(weight, shape, torch.float32)
        assert torch.equal(source.take(weight, shape, torch.float32, cut), whole[cut.index_in(shape)])
