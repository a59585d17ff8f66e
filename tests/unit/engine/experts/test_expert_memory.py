"""What one GPU holds of published mixtures of experts: the table of docs/operating.md, and what their steps keep."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.attention.flashinfer_workspace import Processors
from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.memory_plan import RESERVE_BYTES
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config, read_model_config
from shared.engine.config import Budget, EngineConfig
from shared.engine.cpu.cpu_engine import EXPERT_ROWS_MAX, expert_rows_bytes
from shared.engine.cuda.kernels.packed_experts import GpuExperts, PackedKernels, unpacked_bytes
from shared.engine.cuda.memory import feed_forward_row, graph_tokens, room_for
from shared.engine.cuda.platform import gpu_workspace
from shared.engine.engine import load
from shared.engine.model.expert_banks import read_bank
from shared.engine.model.experts import check_experts, has_grouped
from shared.engine.model.loading import LayerLoader
from shared.engine.model.names import DecoderWeights
from shared.engine.model.ops import PackedBank
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.linears import NarrowProducts
from shared.primitives.errors import ConfigError, ModelError
from tests.doubles.live_bytes import LiveBytes
from tests.unit.engine.checkpoint.popular_shapes import AWQ, MXFP4
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights
from tests.unit.engine.cuda.cards import CARDS, CONFIG, card_memory
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.fp8_models import FORMATS
from tests.unit.engine.tiny_models import save_model

NARROW = NarrowProducts.on_gpu((9, 0), deterministic=False)
BF16 = Dtypes(torch.bfloat16, torch.bfloat16)
STORED: dict[str, dict[str, Any]] = {
    "mxfp4": MXFP4,
    "fp8 by blocks": FORMATS["block"].config,
    "fp8 by channel": FORMATS["channel"].config,
    "fp8 by tensor": FORMATS["tensor"].config,
    "int4 by 128": AWQ,
}
NONE = (None, None, None)
ROOMS: dict[tuple[str, str], tuple[int | None, ...]] = {
    ("Qwen3-30B-A3B", "16 bits"): (123_440, 279_744, 719_152),
    ("Qwen3-30B-A3B", "fp8 by blocks"): (419_008, 575_312, 1_014_736),
    ("Qwen3-30B-A3B", "int4 by 128"): (559_200, 715_504, 1_154_928),
    ("gpt-oss-20b", "16 bits"): (623_696, 936_304, 1_815_136),
    ("gpt-oss-20b", "mxfp4"): (1_173_152, 1_485_760, 2_097_152),
    ("gpt-oss-120b", "mxfp4"): (83_568, 291_984, 877_872),
    ("Mixtral-8x7B-v0.1", "16 bits"): (None, None, 288_656),
    ("Mixtral-8x7B-v0.1", "fp8 by tensor"): (188_736, 305_968, 635_520),
    ("GLM-4.5-Air", "fp8 by channel"): (None, None, 112_896),
    ("gpt-oss-120b", "16 bits"): NONE,
    ("GLM-4.5-Air", "16 bits"): NONE,
    ("Qwen3-235B-A22B", "16 bits"): NONE,
    ("Qwen3-235B-A22B", "fp8 by blocks"): NONE,
    ("Qwen3-235B-A22B", "int4 by 128"): NONE,
    ("Mixtral-8x7B-v0.1", "int4 by 128"): (351_632, 468_848, 798_416),
}


def _shape(name: str, stored: str = "16 bits") -> ModelConfig:
    quantization = {"quantization_config": STORED[stored]} if stored in STORED else {}
    return parse_model_config(PUBLISHED[name].config | quantization)


@pytest.mark.parametrize(("name", "stored"), ROOMS, ids=str)
def test_the_docs_say_how_many_tokens_of_kv_fit(name: str, stored: str) -> None:
    docs = Path("docs/operating.md").read_text(encoding="utf-8")
    shape = _shape(name, stored)
    assert (shape.packed_experts is None) == (stored == "16 bits")
    for tokens, gib in zip(ROOMS[name, stored], CARDS.values(), strict=True):
        if tokens is None:
            with pytest.raises(ModelError, match="too little memory"):
                room_for(shape, BF16, CONFIG, card_memory(gib))
            continue
        room = room_for(shape, BF16, CONFIG, card_memory(gib))
        assert room.pages * 16 == tokens
        assert f"| {tokens:,} |" in docs


@pytest.mark.parametrize(
    ("name", "stored", "bits"),
    [
        ("gpt-oss-120b", "mxfp4", 4.25),
        ("Qwen3-30B-A3B", "fp8 by blocks", 8),
        ("GLM-4.5-Air", "fp8 by channel", 8),
        ("Qwen3-30B-A3B", "int4 by 128", 4 + 40 / 128),
    ],
)
def test_packed_experts_are_planned_as_they_are_kept(name: str, stored: str, bits: float) -> None:
    """The bytes of a layer's matrices, and of all; scales of 8 bits take 1 in 1,000 at most."""
    shape = _shape(name, stored)
    experts, number = shape.experts[-1], shape.layers - 1
    assert experts is not None
    prefix = f"model.layers.{number}.{experts.names.block}.experts"
    bank = read_bank(DecoderWeights(shape, MetaWeights()), prefix, experts, shape.hidden_size, torch.bfloat16)
    assert isinstance(bank, PackedBank)
    kept = bank.gate_up.nbytes + bank.down.nbytes
    numbers = 3 * experts.routing.experts * experts.inner * shape.hidden_size
    assert numbers * bits / 8 <= kept <= numbers * bits / 8 * 1.003
    layers = sum(each is not None for each in shape.experts)
    beside = (shape.parameters - layers * numbers) * 2
    assert shape.weight_bytes(2) - layers * kept in range(beside // 2, beside + 1)  # linears in 8 bits or 16


class GpuOps(TorchOps):
    """Keeps as much as a GPU's kernels do: the gate of FlashInfer makes nothing but its result."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_linear = NARROW.linear  # type: ignore[method-assign]
        kernels = PackedKernels(
            *[lambda _name, _blocks, _threads, _arguments: None] * 2
        )  # of the meta device
        self.experts = GpuExperts(lambda: kernels, (9, 0))  # type: ignore[method-assign]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        *product(
            ["Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "GLM-4.5-Air", "Qwen3-14B"], [None, "channel", "block"]
        ),
        ("gpt-oss-20b", None),
        ("gpt-oss-20b", "mxfp4"),
        ("gpt-oss-120b", "mxfp4"),
    ],
)
@pytest.mark.parametrize("tokens", [512, 4096])  # of which packed experts are read as they are, and unpacked
def test_a_feed_forward_block_keeps_no_more_than_was_set_apart(
    name: str, quantized: str | None, tokens: int
) -> None:
    config = dict(PUBLISHED[name].config)
    if quantized is not None:
        config["quantization_config"] = MXFP4 if quantized == "mxfp4" else FORMATS[quantized].config
    shape = parse_model_config(config)
    tables = {rope: torch.empty(8, rope.rotary_dim, device="meta") for rope in shape.ropes if rope}
    load = LayerLoader(shape, DecoderWeights(shape, MetaWeights()), GpuOps(), torch.bfloat16, tables)
    x, most = torch.empty(tokens, shape.hidden_size, dtype=torch.bfloat16, device="meta"), 0
    for number in (0, shape.layers - 1):
        block = load.layer(number).feed_forward
        with torch.inference_mode(), LiveBytes() as live:
            block(x)
        most = max(most, live.most)
    planned = len(x) * feed_forward_row(shape) * 2
    of_all = 4 * x.nbytes  # which memory is set apart for beside a block's
    assert most <= planned + of_all + NARROW.dequantized_bytes(shape.quantization, shape.linears())
    if (
        tokens == 4096 or shape.packed_experts is None
    ):  # few rows are weighed by a kernel, which keeps nothing
        assert most > 0.7 * planned


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_memory_to_unpack_into_is_set_apart_where_any_layer_takes_it(capability: tuple[int, int]) -> None:
    """Layers of which one keeps its experts in 16 bits, and a GPU that unpacks nothing."""
    kept = {"ignore": ["lm_head", "re:.*layers.0.mlp.experts.*"]}
    config = PUBLISHED["Qwen3-30B-A3B"].config | {"quantization_config": FORMATS["channel"].config | kept}
    shape = parse_model_config(config)
    assert shape.packed_experts is None
    kernels = PackedKernels(*[lambda _name, _blocks, _threads, _arguments: None] * 2)
    make, weights, most = GpuExperts(lambda: kernels, capability), DecoderWeights(shape, MetaWeights()), 0
    for number in (0, 1, shape.layers - 1):
        experts = shape.experts[number]
        assert experts is not None
        prefix = f"model.layers.{number}.mlp.experts"
        bank = read_bank(weights, prefix, experts, shape.hidden_size, torch.bfloat16)
        assert isinstance(bank, PackedBank) == (number > 0)
        with torch.inference_mode(), LiveBytes() as live:
            make(bank, TorchOps().silu_and_mul)
        most = max(most, live.most)
    processors = Processors(count=132, major=capability[0])
    unpacks, beside = (
        gpu_workspace(shape, 64, processors, NARROW, unpacks=each)
        for each in (has_grouped(capability), False)
    )
    assert unpacks - beside == (unpacked_bytes(shape) if capability == (9, 0) else 0)
    numbers = 8 * shape.experts[1].routing.experts if shape.experts[1] else 0  # of the experts
    assert unpacks - beside <= most <= unpacks - beside + numbers


def test_a_gpu_multiplies_fewer_than_1024_experts_at_once() -> None:
    config = PUBLISHED["Qwen3-30B-A3B"].config
    check_experts(parse_model_config(config | {"num_experts": 1023}), torch.bfloat16, (9, 0))
    with pytest.raises(ConfigError, match="1023 experts on a GPU at most"):
        check_experts(parse_model_config(config | {"num_experts": 1024}), torch.bfloat16, (9, 0))


def test_graphs_of_prompts_follow_what_is_computed_and_not_what_is_stored() -> None:
    dense, experts = _shape("Qwen3-14B"), _shape("Qwen3-30B-A3B")
    assert experts.parameters > 2 * dense.parameters
    assert graph_tokens(experts, 2048) > 4 * graph_tokens(dense, 2048)


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "message"),
    [
        ("Qwen3-30B-A3B", torch.bfloat16, (8, 0), "compute capability 9.0 or 10.0, found 8.0"),
        ("Qwen3-30B-A3B", torch.bfloat16, (10, 3), "compute capability 9.0 or 10.0, found 10.3"),
        ("Qwen3-30B-A3B", torch.float16, (9, 0), "computed in bfloat16, got dtype float16"),
        ("Qwen3-30B-A3B", torch.bfloat16, (9, 0), None),
        ("GLM-4.5-Air", torch.bfloat16, (10, 0), None),
    ],
)
def test_a_gpu_without_the_kernel_is_refused(
    name: str, dtype: torch.dtype, capability: tuple[int, int], message: str | None
) -> None:
    if message is None:
        check_experts(_shape(name), dtype, capability)
        return
    with pytest.raises(ConfigError, match=message):
        check_experts(_shape(name), dtype, capability)


@pytest.mark.parametrize(
    ("dtype", "capability", "message"),
    [
        (
            torch.bfloat16,
            (7, 5),
            "experts in mxfp4 need a GPU of compute capability 8.0 or higher, found 7.5",
        ),
        (torch.float16, (9, 0), "computed in bfloat16, got dtype float16"),
        (torch.bfloat16, (8, 0), None),
        (torch.bfloat16, (10, 3), None),
        (torch.bfloat16, (12, 0), None),
    ],
)
def test_packed_experts_need_no_grouped_product(
    dtype: torch.dtype, capability: tuple[int, int], message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_experts(_shape("gpt-oss-120b", "mxfp4"), dtype, capability)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_rows_are_unpacked_for_where_there_are_many_and_a_grouped_product(
    capability: tuple[int, int],
) -> None:
    shape, names = _shape("gpt-oss-20b", "mxfp4"), []
    experts = shape.experts[0]
    assert experts is not None
    kernels = PackedKernels(*[lambda name, _blocks, _threads, _arguments: names.append(name)] * 2)
    weights = DecoderWeights(shape, MetaWeights())
    bank = read_bank(weights, "model.layers.0.mlp.experts", experts, shape.hidden_size, torch.bfloat16)
    products = GpuExperts(lambda: kernels, capability)(bank, TorchOps().silu_and_mul)
    for tokens in (256, 512, 513):  # of 4 experts each, of 32
        x = torch.empty(tokens, shape.hidden_size, dtype=torch.bfloat16, device="meta")
        chosen = torch.empty(tokens, 4, dtype=torch.int64, device="meta")
        assert products(x, chosen, torch.empty(tokens, 4, device="meta")).shape == x.shape
    few, many = (
        ["plan_experts", *[f"{kind}_mxfp4_{width}"] * 2, "weigh_rows"]
        for kind, width in (("multiply", 32), ("many", 64))
    )
    assert names == few + many + (["unpack_mxfp4"] * 2 if capability == (9, 0) else many)


def test_a_cpu_keeps_room_for_a_round_of_rows_of_experts() -> None:
    assert expert_rows_bytes(_shape("Qwen3-30B-A3B")) == 1024 * 4 * (128 + 8 * 2 * (2048 + 768))
    assert expert_rows_bytes(_shape("Qwen3-14B")) == 0
    source = Path("shared/engine/native/experts.cpp").read_text(encoding="utf-8")
    assert f"ROWS_MAX = {EXPERT_ROWS_MAX};" in source


def test_pages_on_a_cpu_leave_that_room(tmp_path: Path) -> None:
    save_model(EXPERT_FAMILIES["mixtral"], tmp_path)
    sizes = EngineConfig(None, 16, 64, max_total_tokens=64)
    engine = load(tmp_path, sizes)
    scratch = expert_rows_bytes(read_model_config(tmp_path))
    assert scratch > 4 * engine.cache.page_bytes
    taken = engine.memory["weights"] + RESERVE_BYTES + scratch
    budget = Budget(taken + 4 * engine.cache.page_bytes, "a test")
    found = load(tmp_path, replace(sizes, max_total_tokens=0, context_len=16, budget=budget))
    assert found.cache.pages == 4
