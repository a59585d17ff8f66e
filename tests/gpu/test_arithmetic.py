"""The kernels' own arithmetic, against transformers and against plain torch: what only a GPU can show."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer import AttentionKernels, FlashInferAttention
from shared.engine.attention.flashinfer_package import flashinfer_package
from shared.engine.attention.heads import HeadTransform
from shared.engine.attention.protocol import PagedBatch, PlanGuard
from shared.engine.checkpoint.families import Activation
from shared.engine.checkpoint.kv_cache import KVCache
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.cuda.kernels.expert_routing import GpuRouting
from shared.engine.cuda.kernels.fp8_inputs import CudaRounding
from shared.engine.cuda.kernels.gemv import ROWS_MAX, Gemv
from shared.engine.cuda.kernels.head_kernels import CudaHeadWriter
from shared.engine.cuda.kernels.int4_tiles import CudaTiles
from shared.engine.cuda.kernels.step_kernels import (
    REPORT_WORDS,
    STATE_WORDS,
    CudaKernels,
    ReferenceKernels,
    read_reports,
)
from shared.engine.cuda.platform import CudaStream, FlashInferOps, Platform
from shared.engine.model.gated_mlp import clamped, gated
from shared.engine.model.ops import ExpertBank, Gated
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.fp8 import E4M3, LARGEST, Fp8Products, TorchRounding, joined
from shared.engine.quantized.fp8_formats import Fp8Format
from shared.engine.quantized.int4 import FEW_ROWS, Int4Products, Tiles
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.mxfp4 import dequantized
from tests.doubles.torch_head_writer import TorchHeadWriter
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.cuda.kernels.test_fp8_inputs import assert_same, numbers
from tests.unit.engine.cuda.kernels.test_step_kernels import (
    any_logits,
    any_state,
    assert_filtered_alike,
    generator_of,
    integers,
)
from tests.unit.engine.driver import tokens_of
from tests.unit.engine.experts.expert_models import GPU_EXPERT_FAMILIES
from tests.unit.engine.late_requests import assert_alike
from tests.unit.engine.precision import Plan, errors, logits_of, moved, token_errors
from tests.unit.engine.quantized.test_fp8 import FORMS, off, parts, tokens
from tests.unit.engine.quantized.test_int4 import any_numbers, tiles_by_hand, weight_of
from tests.unit.engine.tiny_models import GPU_FAMILIES, VOCAB_SIZE, save_model, tiny_model

TOKENS = tokens_of(7, 200, VOCAB_SIZE)  # more than any window
WAYS = {"whole": (200,), "in chunks": (50, 1, 33, 107, 1, 1, 7), "after a cached prefix": (128, 72)}
ROWS, SLOTS, VOCAB = 10_000, 12_000, 4099
CHOSEN = (
    (1, 151_936),
    (7, 151_936),
    (64, 32_001),
    (ROWS, VOCAB),
)  # rows and vocabulary: many blocks a row, and one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_the_error_is_that_of_transformers_in_the_same_type(
    gpu: torch.device, family: str, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_model(family, tmp_path)
    found = logits_on(gpu, tmp_path, WAYS[way], dtype)
    ours, theirs = errors(tmp_path, TOKENS, found, dtype, str(gpu))
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", GPU_EXPERT_FAMILIES)
def test_with_experts_half_of_the_tokens_are_as_near(
    gpu: torch.device, family: str, way: str, tmp_path: Path
) -> None:
    """Rounding decides between experts that are nearly equal, and then a token's numbers are others."""
    save_model(GPU_EXPERT_FAMILIES[family], tmp_path)
    found = logits_on(gpu, tmp_path, WAYS[way], torch.bfloat16)
    ours, theirs = token_errors(tmp_path, TOKENS, found, torch.bfloat16, str(gpu))
    assert float(ours.median()) <= 1.5 * float(theirs.median())


@pytest.mark.parametrize("rows", [1, 3, 64, 300])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_experts_as_a_graph_follow_each_step_s_choice(platform: Platform, name: str, rows: int) -> None:
    """Of as many experts as the model has, with smaller ones; the last of them, and half of all, nobody chooses."""
    shape = parse_model_config(PUBLISHED[name].config).experts[0]
    assert shape is not None
    count, chosen, hidden, inner = shape.routing.experts, shape.routing.chosen, 64, 40
    generator = torch.Generator().manual_seed(rows)

    def numbers(*sizes: int) -> Tensor:
        made = torch.randn(sizes, generator=generator) / math.sqrt(sizes[-1])
        return made.bfloat16().to(platform.device)

    biases = (numbers(count, 2 * inner), numbers(count, hidden)) if shape.biased else (None, None)
    bank = ExpertBank(numbers(count, 2 * inner, hidden), numbers(count, hidden, inner), *biases)
    gate = clamped(shape.clamped) if shape.clamped else TorchOps().silu_and_mul
    with platform.forward.on_host():
        products = platform.ops.experts(bank, gate if shape.clamped else gated(Activation.SILU, platform.ops))
        steps = [
            (
                numbers(rows, hidden),
                torch.rand(rows, count // 2, generator=generator).topk(chosen).indices.to(platform.device),
                torch.rand(rows, chosen, generator=generator).to(platform.device),
            )
            for _ in range(3)
        ]
        x, experts, weights = (each.clone() for each in steps[0])
        y = torch.empty_like(x)

    def work() -> None:
        y.copy_(products(x, experts, weights))

    platform.forward.run(work)
    replay = platform.forward.capture(work)
    platform.forward.synchronize()
    for step in steps:
        with platform.forward.on_host():
            for static, each in zip((x, experts, weights), step, strict=True):
                static.copy_(each)
        platform.forward.run(replay)
        platform.forward.synchronize()
        with platform.forward.on_host():
            exact = sum(
                each.unsqueeze(1) * _of_experts(bank, gate, step[0].float(), number)
                for each, number in zip(step[2].unbind(1), step[1].unbind(1), strict=True)
            )
            assert isinstance(exact, Tensor)
            assert float((y.float() - exact).abs().max()) < 0.03 * float(exact.abs().max())
            assert torch.equal(y, products(*step))


def test_experts_of_4_bits_are_read_exactly(platform: Platform) -> None:
    """Every pair of numbers under every scale that lets it be finite: a power of two that is off by a bit is seen."""
    scales = torch.arange(1, 253, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(len(scales), 16, 16)
    found = dequantized(
        blocks.to(platform.device), scales.unsqueeze(1).expand(-1, 16).to(platform.device)
    ).cpu()
    halves = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    numbers = [sign * half for sign in (1, -1) for half in halves]
    pairs = torch.tensor([numbers[half] for byte in range(256) for half in (byte & 15, byte >> 4)])
    for row, scale in zip(found, scales.tolist(), strict=True):
        assert torch.equal(row.double(), pairs.double() * 2.0 ** (scale - 127))
    assert torch.equal(found.bfloat16().float(), found)


def _of_experts(bank: ExpertBank, gate: Gated, x: Tensor, number: Tensor) -> Tensor:
    """What the experts of these numbers [rows] give of x [rows, hidden], in float32."""
    inner = torch.einsum("rh,roh->ro", x, bank.gate_up[number].float())
    if bank.gate_up_bias is not None:
        inner = inner + bank.gate_up_bias[number].float()
    found = torch.einsum("ri,roi->ro", gate(inner), bank.down[number].float())
    return found if bank.down_bias is None else found + bank.down_bias[number].float()


def logits_on(gpu: torch.device, folder: Path, steps: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits after every token by FlashInfer's kernels and ours, float32 [tokens, vocab]."""
    library, stream = flashinfer_package(), CudaStream(gpu)

    def plan_with(config: ModelConfig, cache: KVCache) -> Plan:
        heads = CudaHeadWriter.compiled(gpu)
        attention = FlashInferAttention(
            config, cache, AttentionKernels(library, heads), lambda: PlanGuard(stream.record), requests=4
        )
        return attention.plan_extend

    with stream.on_host():
        ops = FlashInferOps(library, routing=GpuRouting.compiled(gpu))
        found = logits_of(folder, TOKENS, steps, ops, dtype=dtype, device=str(gpu), plan_with=plan_with)
    stream.synchronize()
    return found


@pytest.mark.parametrize("size", [128, 384, 5120, 17_408])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_fp8_inputs_are_rounded_as_on_the_cpu(gpu: torch.device, rows: int, size: int) -> None:
    """Not as torch rounds them on a GPU, where it divides by a number of the host by multiplying."""
    kernel, x, scale = CudaRounding.compiled(gpu), numbers(rows, size), torch.tensor(0.7 / LARGEST)
    assert_same(on_cpu(kernel.blocks(x.to(gpu))), TorchRounding().blocks(x))
    assert_same(on_cpu(kernel.rows(x.to(gpu))), TorchRounding().rows(x))
    assert_same(on_cpu(kernel.rows(x.to(gpu), scale.to(gpu))), TorchRounding().rows(x, scale))


def on_cpu(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].cpu(), pair[1].cpu()


@pytest.mark.parametrize("rows", [1, 3, 4, 64, 300])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_fp8_products_are_as_near_as_the_rounding_of_their_inputs_allows(
    gpu: torch.device, form: Fp8Format, rows: int
) -> None:
    """By torch's kernels where the GPU has them, eagerly and as a graph: the bound is derived in the test beside."""
    rounding = CudaRounding.compiled(gpu)
    capability = torch.cuda.get_device_capability(gpu)
    products = Fp8Products.on_gpu(capability, deterministic=False, rounding=rounding)
    merged = joined(parts(form, inputs=640, sizes=((256, 1.0), (128, 8.0), (128, 0.1))))
    weight = replace(
        merged,
        values=merged.values.to(gpu),
        scales=merged.scales.to(gpu),
        input_scale=merged.input_scale if merged.input_scale is None else merged.input_scale.to(gpu),
    )
    stream, bias = CudaStream(gpu), torch.randn(512, device=gpu).bfloat16()
    x, y = tokens(640, torch.bfloat16, rows).to(gpu), torch.empty(rows, 512, dtype=torch.bfloat16, device=gpu)
    linear, biased = products.linear(weight, None), products.linear(weight, bias)
    rounds = products.way(form).endswith("multiplied")
    with stream.on_host():
        assert off(linear, weight, x, rounds=rounds) <= 1
        torch.testing.assert_close(biased(x), linear(x) + bias, rtol=2**-7, atol=1e-2)

    def work() -> None:
        y.copy_(linear(x))

    replay = stream.capture(work)
    with stream.on_host():
        replay()
        assert torch.equal(y, linear(x))


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(24, 544, 32), (136, 1344, 32), (136, 1344, 64), (640, 1280, 64), (640, 1280, 128), (640, 1280, 256)],
)
def test_int4_products_are_those_of_the_rounded_weights(
    gpu: torch.device, outputs: int, inputs: int, group: int
) -> None:
    """torch's kernel, ours that dequantizes its tiles, and what both are compared with on a CPU, are one weight."""
    found = any_numbers(outputs, inputs, group)
    weight, exact = weight_of(found), found.rounded.to(gpu)
    products = Int4Products.on_gpu(
        torch.cuda.get_device_capability(gpu), deterministic=False, dequantize=CudaTiles.compiled(gpu)
    )
    on_gpu = Int4Weight(*(each.to(gpu) for each in (weight.values, weight.scales, weight.zeros)))
    stream, bias = CudaStream(gpu), torch.randn(outputs, device=gpu).bfloat16()
    linear, biased = products.linear(on_gpu, None), products.linear(on_gpu, bias)
    with stream.on_host():
        tiles = Tiles.of(on_gpu)
        assert torch.equal(tiles.words.cpu(), tiles_by_hand(found.numbers, 2 * tiles.words.shape[3]))
        assert torch.equal(CudaTiles.compiled(gpu)(tiles).float(), exact)
        assert torch.equal(tiles.dequantized().float(), exact)
        # a row of one number has that number's weights as its products, each rounded already
        units = torch.eye(inputs, dtype=torch.bfloat16, device=gpu)[:: max(1, inputs // FEW_ROWS)][:FEW_ROWS]
        assert torch.equal(linear(units).float(), units.float() @ exact.t())
        for rows in (1, 16, 17, FEW_ROWS, FEW_ROWS + 1, 300):
            x = torch.randn(rows, inputs, device=gpu).bfloat16()
            y, wanted = linear(x), x.double() @ exact.double().t()
            sums = x.double().abs() @ exact.double().abs().t()
            assert ((y.double() - wanted).abs() <= 2**-8 * wanted.abs() + inputs * 2**-23 * sums).all()
            torch.testing.assert_close(biased(x), y + bias, rtol=2**-7, atol=2**-7)
            if rows <= FEW_ROWS:
                assert torch.equal(linear(x[:1]), y[:1]), "a row does not depend on those beside it"

    def work() -> None:
        y.copy_(linear(x))

    replay = stream.capture(work)
    with stream.on_host():
        y.zero_()
        replay()
        assert torch.equal(y, linear(x))


@pytest.mark.parametrize(("rows", "vocab"), CHOSEN)
def test_our_kernels_are_the_reference_bit_for_bit(gpu: torch.device, rows: int, vocab: int) -> None:
    generator, compiled, reference = generator_of(1), CudaKernels.compiled(gpu), ReferenceKernels()
    state = any_state(generator, SLOTS).to(gpu)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].int().to(gpu)
    logits = any_logits(generator, rows, vocab).to(gpu)
    found = []
    for kernels in (compiled, reference):
        own, tokens = state.clone(), torch.zeros(rows, dtype=torch.int32, device=gpu)
        kernels.chooser(logits, slots, own, tokens)()
        found.append((own, tokens))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_kernels_of_heads_are_the_reference_but_for_sums(
    gpu: torch.device, fp8_kv: bool, rows: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    heads, kv_heads, page_size, pages = 5, 2, 16, -(-rows // 16)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim, device=gpu).mul_(3).to(dtype)
    angles = torch.rand(rows, head_dim // 2, device=gpu) * 7
    q_norm, k_norm = (torch.rand(2, head_dim, device=gpu) + 0.5).to(dtype)
    transform = HeadTransform(q_norm, k_norm, 1e-6, torch.cat((angles.cos(), angles.sin()), dim=1))
    tables = torch.randperm(pages).int().unsqueeze(0)
    batch = moved(PagedBatch.of(torch.tensor([rows]), torch.tensor([rows]), tables, page_size), str(gpu))
    found = []
    for writer in (CudaHeadWriter.compiled(gpu), TorchHeadWriter()):
        kept = E4M3 if fp8_kv else dtype
        cells = torch.zeros(pages, 3, 2, kv_heads, page_size, head_dim, dtype=kept, device=gpu)
        q, k, v = torch.split(qkv.clone(), [heads, kv_heads, kv_heads], dim=1)
        queries = writer.write(q, k, v, transform, batch, cells[:, 1])
        found.append((queries, cells.float() if fp8_kv else cells))
    for ours, wanted in zip(*found, strict=True):
        eps = torch.finfo(E4M3 if fp8_kv else dtype).eps
        torch.testing.assert_close(ours, wanted, rtol=2 * eps, atol=1e-2)
        assert (ours != wanted).float().mean() < 0.01


def test_words_are_written_as_the_reference_writes_them(gpu: torch.device) -> None:
    generator, compiled = generator_of(2), CudaKernels.compiled(gpu)
    words = torch.zeros(SLOTS * STATE_WORDS, dtype=torch.int32, device=gpu)
    places = torch.randperm(len(words), generator=generator)[:ROWS].int()
    entries = (
        torch.stack((places, integers(generator, -(2**31), 2**31, ROWS).int()), dim=1).contiguous().to(gpu)
    )
    expected = words.clone()
    ReferenceKernels().write_words(entries, expected)
    compiled.write_words(entries, words)
    assert torch.equal(words, expected)


def test_what_is_told_of_tokens_is_the_reference_but_for_the_last_bits(gpu: torch.device) -> None:
    generator, compiled, reference = generator_of(3), CudaKernels.compiled(gpu), ReferenceKernels()
    logits = any_logits(generator, 100, VOCAB)
    logits[:, 0] = logits[:, 0].nan_to_num(0.0, neginf=0.0)  # a row that allows nothing says nothing
    logits = logits.to(gpu)
    places, tokens = torch.arange(100).int().to(gpu), integers(generator, 0, VOCAB, 100).to(gpu)
    tops, found = torch.full((100,), 20, dtype=torch.int32, device=gpu), []
    for kernels in (compiled, reference):
        told = torch.zeros(100, REPORT_WORDS, dtype=torch.int32, device=gpu)
        kernels.logprobs(logits, places, tokens, tops, told)
        found.append(read_reports(told.cpu(), [20] * 100, VOCAB))
    assert_alike(*found)
    alone = torch.zeros(1, REPORT_WORDS, dtype=torch.int32, device=gpu)
    compiled.logprobs(logits[7:8], places[:1], tokens[7:8], tops[:1], alone)
    told = torch.zeros(100, REPORT_WORDS, dtype=torch.int32, device=gpu)
    compiled.logprobs(logits, places, tokens, tops, told)
    assert torch.equal(alone[0], told[7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1024, 4096), (3072, 1024), (17408, 5120), (1024, 151_936), (1000, 7)], ids=str
)
def test_kernels_of_few_rows_round_the_sums_once(
    gpu: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs, outputs = shape
    torch.manual_seed(inputs)
    gemv, weight = Gemv.compiled(gpu), torch.randn(outputs, inputs, device=gpu).to(dtype)
    for rows in range(1, ROWS_MAX + 1):
        x = torch.randn(rows, inputs, device=gpu).to(dtype)
        wide = gemv(x, weight, None, torch.empty(rows, outputs, device=gpu))
        torch.testing.assert_close(
            wide.double(), x.double() @ weight.double().t(), rtol=0, atol=1e-5 * inputs**0.5
        )
        assert torch.equal(gemv(x, weight, None, x.new_empty(rows, outputs)), wide.to(dtype))


VOCABULARIES = (151_936, 128_256, 32_001)  # of Qwen3, Llama 3, and one that no block size divides
FILTERED_ROWS = (1, 3, 45, 256)
LAUNCHES = 1000


def filters_of(vocab_size: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, vocab]; top_k [rows]; temperature, top_p and the logarithm of min_p [3, rows]: all mixed."""
    generator = generator_of(rows)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    logits[::5] = logits[::5].round()
    logits[1::4, 9:] = -torch.inf  # as a mask that allows fewer than most top_k
    top_k = torch.tensor([1, 20, 50, vocab_size, 1024, 5000], dtype=torch.int32).repeat(rows)[:rows]
    top_p = torch.tensor([1e-6, 0.5, 0.95, 1.0, 0.95]).repeat(rows)[:rows]
    min_p = torch.tensor([0.0, 0.0, 0.01]).repeat(rows)[:rows]
    factors = torch.stack([torch.full((rows,), 0.6), top_p, min_p.log()])
    return logits.to(device), top_k.to(device), factors.to(device)


@pytest.mark.parametrize("rows", FILTERED_ROWS)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_filters_exclude_what_plain_torch_excludes(gpu: torch.device, vocab_size: int, rows: int) -> None:
    logits, top_k, factors = filters_of(vocab_size, rows, gpu)
    each, found, wanted = torch.arange(rows).int().to(gpu), logits.clone(), logits.clone()
    CudaKernels.compiled(gpu).filter_rows(found, each, top_k, factors)
    ReferenceKernels().filter_rows(wanted, each, top_k, factors)
    # The last bits of exp are another machine's: the nucleus may end one value earlier or later.
    assert_filtered_alike(*(tensor.cpu() for tensor in (logits, found, wanted, top_k, factors)))


def test_filters_exclude_the_same_again_and_again(gpu: torch.device) -> None:
    kernels, vocab_size = CudaKernels.compiled(gpu), VOCABULARIES[0]
    logits, top_k, factors = filters_of(vocab_size, 45, gpu)
    each, first = torch.arange(45).int().to(gpu), logits.clone()
    kernels.filter_rows(first, each, top_k, factors)
    same = torch.ones((), dtype=torch.bool, device=gpu)
    for _ in range(LAUNCHES):
        found = logits.clone()
        kernels.filter_rows(found, each, top_k, factors)
        same &= (found == first).all()
    assert bool(same)
