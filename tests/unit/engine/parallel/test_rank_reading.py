"""A rank reads its part of each weight that is cut, and all ranks together read all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.model.loading import load_decoder
from shared.engine.model.rank_ops import RankOps
from shared.engine.model.torch_ops import TorchOps
from shared.engine.parallel.collectives import Alone
from shared.engine.parallel.shares import Share
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ConfigError
from tests.unit.engine.checkpoint.published_models import PUBLISHED
from tests.unit.engine.fp8_models import FORMATS
from tests.unit.engine.int4_models import INT4_FORMATS

Reads = dict[
    str, list[tuple[Part, tuple[int, ...], int]]
]  # by name: what was read, the whole's shape, bytes a number


class MetaReads:
    """`WeightSource` of shapes alone that keeps what is read."""

    def __init__(self) -> None:
        self.reads: Reads = {}

    def __contains__(self, name: str) -> bool:
        return not name.endswith("g_idx")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`."""
        read = part or Part(0, shape[0] if shape else 1)
        self.reads.setdefault(name, []).append((read, shape, dtype.itemsize))
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return whole[part.index_in(shape)] if part else whole

    def bytes_of(self, name: str) -> int:
        return sum(
            (read.stop - read.start) * (math.prod(shape) // shape[read.dim] if shape else 1) * size
            for read, shape, size in self.reads[name]
        )


class NotAsked(Alone):
    """Collectives of a rank that computes nothing."""

    def __init__(self, share: Share) -> None:
        self.share = share


def read_by(config: ModelConfig, share: Share) -> MetaReads:
    source, ops = MetaReads(), RankOps(TorchOps(), NotAsked(share))
    load_decoder(config, source, ops, context_len=64, dtype=torch.bfloat16)
    return source


MODELS: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("Llama-3.1-8B", "Qwen3-30B-A3B", "GLM-4.5-Air", "gpt-oss-20b", "Qwen2.5-7B")},
    **{f"Qwen3-14B, {name}": written.config for name, written in FORMATS.items() if "fp8 by" not in name},
    **{f"Qwen3-14B, {name}": written.config for name, written in INT4_FORMATS.items()},
    "Qwen3-30B-A3B, block": FORMATS["block"].config,
    "Qwen3-30B-A3B, gptq, asym": INT4_FORMATS["gptq, asym"].config,
    "GLM-4.5-Air, block": FORMATS["block"].config,
}


def config_of(name: str) -> ModelConfig:
    """Three layers are like all of them."""
    config: Any = PUBLISHED[name.partition(",")[0]].config
    quantization = {"quantization_config": MODELS[name]} if MODELS[name] else {}
    whole = parse_model_config(config | quantization)
    return replace(
        whole, layers=3, windows=whole.windows[:3], ropes=whole.ropes[:3], experts=whole.experts[:3]
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_no_more_than_its_part(name: str, ranks: int) -> None:
    config = config_of(name)
    whole = read_by(config, Share())
    found = [read_by(config, Share(rank, ranks)) for rank in range(ranks)]
    for tensor in whole.reads:
        total = whole.bytes_of(tensor)
        each = [source.bytes_of(tensor) if tensor in source.reads else 0 for source in found]
        if ".experts." in tensor and each.count(0) == ranks - 1:
            assert sum(each) == total, "an expert is on one rank"
        elif each == [total] * ranks:
            one_number = whole.reads[tensor][0][1] == ()
            assert one_number or is_whole(tensor, config), f"{tensor} is read whole by each rank"
        elif sum(each) == total and each.count(0) == ranks - 1:
            assert tensor.endswith(("o_proj.bias", "down_proj.bias")), tensor
        else:
            assert max(each) <= total / ranks + spare(found, tensor), tensor
            if not tensor.endswith(("scale", "scale_inv")):
                assert covered(found, tensor), f"{tensor} is not read whole by all ranks together"


def is_whole(tensor: str, config: ModelConfig) -> bool:
    """Whether each rank reads all of it: norms, routers, and scales that all inputs or outputs share."""
    if tensor.endswith(("norm.weight", "input_scale", "gate.weight", "router.weight", "correction_bias")):
        return True
    if (
        ".router." in tensor
        or ".gate." in tensor
        or tensor.endswith(("_layernorm.weight", "activation_scale"))
    ):
        return True
    one_for_all = "block" not in str(config.quantization)
    return tensor.endswith(("scale", "scales", "qzeros", "zero_point")) and one_for_all


def spare(found: list[MetaReads], tensor: str) -> float:
    """Bytes of a block, or of a row of padding: where blocks end, a rank may have one more."""
    largest = 0
    for source in found:
        for read, shape, size in source.reads[tensor]:
            # experts are whole, and so are blocks of 128 numbers of a narrow format
            along = (
                1 if len(shape) > 2 or "embed" in tensor or "lm_head" in tensor or "scale" in tensor else 128
            )
            largest = max(largest, along * math.prod(shape) // shape[read.dim] * size)
    return largest


def covered(found: list[MetaReads], tensor: str) -> bool:
    places: set[int] = set()
    for source in found:
        for read, _, _ in source.reads[tensor]:
            places |= set(range(read.start, read.stop))
    read, shape, _ = found[0].reads[tensor][0]
    return places == set(range(shape[read.dim]))


def test_a_model_that_cannot_be_cut_is_refused_before_a_weight_is_read() -> None:
    config, source = config_of("Qwen2.5-7B"), MetaReads()  # 28 heads, 4 key-value heads
    ops = RankOps(TorchOps(), NotAsked(Share(0, 8)))
    with pytest.raises(ConfigError, match="28 heads and 4 key-value heads: use 1, 2 or 4 GPUs"):
        load_decoder(config, source, ops, context_len=64, dtype=torch.bfloat16)
    assert source.reads == {}
