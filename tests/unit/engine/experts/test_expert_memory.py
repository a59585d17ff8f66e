"""What one GPU holds of published mixtures of experts: the table of docs/operating.md, and what their steps keep."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.dtypes import Dtypes
from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.cuda.memory import feed_forward_row, graph_tokens, room_for
from shared.engine.model.experts import check_grouped
from shared.engine.model.loading import LayerLoader
from shared.engine.model.names import DecoderWeights
from shared.engine.model.torch_ops import TorchOps
from shared.engine.quantized.linears import NarrowProducts
from shared.primitives.errors import ConfigError, ModelError
from tests.doubles.live_bytes import LiveBytes
from tests.unit.engine.checkpoint.published_models import PUBLISHED, MetaWeights
from tests.unit.engine.cuda.cards import CARDS, CONFIG, card_memory
from tests.unit.engine.fp8_models import FORMATS

NARROW = NarrowProducts.on_gpu((9, 0), deterministic=False)
BF16 = Dtypes(torch.bfloat16, torch.bfloat16)
ROOMS: dict[str, tuple[int | None, ...]] = {
    "Qwen3-30B-A3B": (123_440, 279_744, 719_152),
    "Mixtral-8x7B-v0.1": (None, None, 288_656),
    "gpt-oss-20b": (623_696, 936_304, 1_815_136),
    "gpt-oss-120b": (None, None, None),
    "GLM-4.5-Air": (None, None, None),
    "Qwen3-235B-A22B": (None, None, None),
}


def _shape(name: str) -> ModelConfig:
    return parse_model_config(PUBLISHED[name].config)


@pytest.mark.parametrize("name", ROOMS)
def test_the_docs_say_how_many_tokens_of_kv_fit(name: str) -> None:
    docs = Path("docs/operating.md").read_text(encoding="utf-8")
    for tokens, gib in zip(ROOMS[name], CARDS.values(), strict=True):
        if tokens is None:
            with pytest.raises(ModelError, match="too little memory"):
                room_for(_shape(name), BF16, CONFIG, card_memory(gib))
            continue
        room = room_for(_shape(name), BF16, CONFIG, card_memory(gib))
        assert room.pages * 16 == tokens
        assert f"| {tokens:,} |" in docs


class GpuOps(TorchOps):
    """Keeps as much as a GPU's kernels do: the gate of FlashInfer makes nothing but its result."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_linear = NARROW.linear  # type: ignore[method-assign]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        *product(
            ["Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "GLM-4.5-Air", "Qwen3-14B"], [None, "channel", "block"]
        ),
        ("gpt-oss-20b", None),  # MXFP4 already
    ],
)
def test_a_feed_forward_block_keeps_no_more_than_was_set_apart(name: str, quantized: str | None) -> None:
    config = dict(PUBLISHED[name].config)
    if quantized is not None:
        config["quantization_config"] = FORMATS[quantized].config
    shape = parse_model_config(config)
    tables = {rope: torch.empty(8, rope.rotary_dim, device="meta") for rope in shape.ropes if rope}
    load = LayerLoader(shape, DecoderWeights(shape, MetaWeights()), GpuOps(), torch.bfloat16, tables)
    x, most = torch.empty(512, shape.hidden_size, dtype=torch.bfloat16, device="meta"), 0
    for number in (0, shape.layers - 1):
        block = load.layer(number).feed_forward
        with torch.inference_mode(), LiveBytes() as live:
            block(x)
        most = max(most, live.most)
    planned = len(x) * feed_forward_row(shape) * 2
    of_all = 4 * x.nbytes  # which memory is set apart for beside a block's
    assert (
        0.7 * planned
        < most
        <= planned + of_all + NARROW.dequantized_bytes(shape.quantization, shape.linears())
    )


def test_a_gpu_multiplies_fewer_than_1024_experts_at_once() -> None:
    config = PUBLISHED["Qwen3-30B-A3B"].config
    check_grouped(parse_model_config(config | {"num_experts": 1023}), torch.bfloat16, (9, 0))
    with pytest.raises(ConfigError, match="1023 experts on a GPU at most"):
        check_grouped(parse_model_config(config | {"num_experts": 1024}), torch.bfloat16, (9, 0))


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
        check_grouped(_shape(name), dtype, capability)
        return
    with pytest.raises(ConfigError, match=message):
        check_grouped(_shape(name), dtype, capability)
