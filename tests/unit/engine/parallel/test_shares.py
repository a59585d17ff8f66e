"""What a rank holds: parts that together are the whole, of every kind of weight; and what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.engine.checkpoint.model_config import ModelConfig, parse_model_config
from shared.engine.parallel.shares import RANKS_MAX, ModelShare, Share
from shared.engine.quantized import linears
from shared.engine.quantized.formats import Quantization, WeightFormat
from shared.engine.quantized.fp8 import Fp8Weight
from shared.engine.quantized.fp8_formats import BLOCK, Fp8Format, Scales
from shared.engine.quantized.int4_formats import GROUPS, Int4Format, Packing
from shared.engine.quantized.int4_packings import Int4Weight
from shared.engine.quantized.weight_source import Part
from shared.primitives.errors import ConfigError
from tests.unit.engine.checkpoint.published_models import PUBLISHED

LLAMA = parse_model_config(PUBLISHED["Llama-3.1-8B"].config)
GLM = parse_model_config(PUBLISHED["GLM-4.5-Air"].config)
BLOCKS = Fp8Format(Scales.BLOCK)


def shares(config: ModelConfig, ranks: int) -> list[ModelShare]:
    return [ModelShare(config, Share(rank, ranks)) for rank in range(ranks)]


def able(config: ModelConfig) -> list[int]:
    found = []
    for ranks in range(1, RANKS_MAX + 1):
        try:
            found += [len(shares(config, ranks))]
        except ConfigError:
            continue
    return found


@given(st.integers(0, 3000), st.integers(1, 200), st.integers(1, 16))
def test_parts_of_all_ranks_are_the_whole_in_order(count: int, step: int, ranks: int) -> None:
    parts = [Share(rank, ranks).of(count, step) for rank in range(ranks)]
    assert [each for part in parts for each in part] == list(range(count))
    assert all(part.start % step == 0 for part in parts if part)
    steps = -(-count // step)
    most = -(-steps // ranks) * step
    assert all(len(part) <= most for part in parts), "no more than a part, in whole steps"


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_a_published_model_all_is_held_and_by_the_rank_that_reads_it(name: str) -> None:
    config = parse_model_config(PUBLISHED[name].config)
    counts = able(config)
    assert counts[0] == 1
    for ranks in counts:
        held = shares(config, ranks)
        group = config.heads // config.kv_heads
        for share in held:
            own = share.config
            assert (own.heads, own.kv_heads) == (len(share.heads), len(share.kv_heads))
            assert own.heads == config.heads // ranks
            # what attention pairs is what the whole model pairs
            local = own.heads // own.kv_heads
            for place, head in enumerate(share.heads):
                assert share.kv_heads[place // local] == head // group
        for kv_head in range(config.kv_heads):
            assert sum(kv_head in share.kv_heads for share in held) == max(1, ranks // config.kv_heads)
        for inner in {config.intermediate_size} | {each.shared_inner for each in config.experts if each}:
            assert [at for share in held for at in share.columns(inner)] == list(range(inner))
        assert [at for share in held for at in share.vocabulary] == list(range(config.vocab_size))
        for experts in {each for each in config.experts if each}:
            found = [share.experts(experts) for share in held]
            assert [at for each in found for at in each] == list(range(experts.routing.experts))
            assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_a_rank_are_its_part_and_what_all_ranks_hold(name: str) -> None:
    config = parse_model_config(PUBLISHED[name].config)
    hidden = config.hidden_size
    for ranks in able(config):
        found = [share.config.parameters for share in shares(config, ranks)]
        routers = sum(each.routing.experts * (hidden + 2) for each in config.experts if each)
        norms = (6 * config.layers + 1) * hidden + 2 * config.layers * config.head_dim
        biases = config.layers * (config.kv_heads * config.head_dim + hidden) * 2
        kv_copies = 2 * max(0, ranks - config.kv_heads) * hidden * config.head_dim * config.layers
        padding = 2 * ranks * hidden
        doubled = (ranks - 1) * (routers + norms + biases) + kv_copies + padding
        assert config.parameters <= sum(found) <= config.parameters + doubled


def test_one_rank_is_the_model_itself() -> None:
    share = ModelShare(LLAMA)
    assert share.config is LLAMA
    assert share.part(share.heads, 128) is None


def test_the_name_of_a_model_says_nothing_of_ranks() -> None:
    """Its fingerprint is a hash of these words, and a stream may move between workers of any number of ranks."""
    own = ModelShare(GLM, Share(1, 2)).config
    whole = replace(
        own,
        heads=GLM.heads,
        kv_heads=GLM.kv_heads,
        intermediate_size=GLM.intermediate_size,
        experts=GLM.experts,
    )
    assert repr(whole) == repr(GLM)
    assert repr(own.experts[-1]) == repr(replace(GLM.experts[-1], shared_inner=own.experts[-1].shared_inner))  # type: ignore[type-var, union-attr]


@pytest.mark.parametrize(
    ("changes", "ranks", "sentence"),
    [
        (
            {},
            3,
            "3 GPUs cannot share this model, which has 32 heads and 8 key-value heads: use 1, 2, 4, 8 or 16 GPUs",
        ),
        ({"heads": 14, "kv_heads": 2}, 4, "which has 14 heads and 2 key-value heads: use 1, 2 or 14 GPUs"),
        ({"heads": 9, "kv_heads": 3}, 2, "which has 9 heads and 3 key-value heads: use 1, 3 or 9 GPUs"),
        ({"heads": 7, "kv_heads": 7, "vocab_size": 4}, 7, "which has 4 tokens: use 1 GPU"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(
    changes: dict[str, Any], ranks: int, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelShare(replace(LLAMA, **changes), Share(0, ranks))
    assert str(refused.value).endswith(sentence)


def test_experts_and_blocks_that_are_fewer_than_ranks_are_refused() -> None:
    experts = tuple(
        each and replace(each, routing=replace(each.routing, experts=9, groups=1)) for each in GLM.experts
    )
    with pytest.raises(ConfigError, match="which has 9 experts a layer: use 1, 2, 4 or 8 GPUs"):
        ModelShare(replace(GLM, experts=experts), Share(0, 16))
    few = replace(quantized(LLAMA, BLOCKS), intermediate_size=384)
    with pytest.raises(ConfigError, match="MLPs of 384 numbers in blocks of 128: use 1 or 2 GPUs"):
        ModelShare(few, Share(0, 4))
    narrow = replace(quantized(LLAMA, BLOCKS), head_dim=24)
    with pytest.raises(
        ConfigError, match="in blocks of 128 inputs, while a GPU's heads have 192: use 1 or 2 GPUs"
    ):
        ModelShare(narrow, Share(0, 4))


def quantized(config: ModelConfig, form: WeightFormat) -> ModelConfig:
    return replace(config, quantization=Quantization(form))


def test_inner_numbers_are_cut_where_blocks_begin() -> None:
    """GLM-4.5-Air has 10,944, which are 85 blocks and a half."""
    config = quantized(GLM, BLOCKS)
    parts = [share.columns(10_944) for share in shares(config, 4)]
    assert [len(part) for part in parts] == [22 * BLOCK, 22 * BLOCK, 21 * BLOCK, 20 * BLOCK + 64]


# ---- parts of narrow weights -----------------------------------------------------------------------------------------


class CountedTensors:
    """`WeightSource` of random tensors of the shapes that are asked for; counts the bytes that are read of each."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}
        self.all: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return not name.endswith("g_idx")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """See `WeightSource`."""
        if name not in self.all:
            generator = torch.Generator().manual_seed(len(self.all))
            self.all[name] = _random(shape, dtype, generator)
        whole = self.all[name]
        assert whole.shape == shape
        found = whole if part is None else whole[part.index_in(shape)]
        self.read[name] = found.nbytes
        return found


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is torch.int32:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    numbers = torch.rand(shape, generator=generator) + 0.5
    return numbers.to(dtype)


FORMATS: list[WeightFormat] = [
    *(Fp8Format(scales) for scales in Scales),
    *(
        Int4Format(packing, group, symmetric)
        for packing in Packing
        for group in (*GROUPS, None)
        for symmetric in (False, True)
        if packing is Packing.COMPRESSED or not symmetric
    ),
]


def _dequantized(weight: linears.NarrowWeight) -> Tensor:
    assert isinstance(weight, Fp8Weight | Int4Weight)
    return weight.dequantized()


@given(st.sampled_from(FORMATS), st.sampled_from([1, 2, 3, 4]), st.integers(0, 1), st.integers(0, 3))
def test_parts_of_a_narrow_weight_are_those_of_the_whole(
    form: WeightFormat, ranks: int, dim: int, more: int
) -> None:
    """Rows are cut by eight, columns at blocks or groups; no scale and no word is read that no number needs."""
    outputs, inputs = 256 + 8 * more, 1024 + 256 * more
    step = 8 if dim == 0 else BLOCK if isinstance(form, Fp8Format) else form.group or 32
    source = CountedTensors()
    whole = _dequantized(linears.take(source, form, "w", outputs, inputs))
    sizes, parts = dict(source.read), []
    for rank in range(ranks):
        held = Share(rank, ranks).of((outputs, inputs)[dim], step)
        weight = linears.take(source, form, "w", outputs, inputs, Part(held.start, held.stop, dim))
        parts.append(_dequantized(weight))
        share = len(held) / (outputs, inputs)[dim]
        for name, read in source.read.items():
            spare = 0.0  # blocks that rows lie in, and scales that all columns share
            if isinstance(form, Fp8Format) and not name.endswith("w.weight"):
                spare = 2 * BLOCK / outputs if form.scales is Scales.BLOCK else 1
            if isinstance(form, Int4Format) and form.group is None and dim == 1:
                spare = float(not name.endswith(("qweight", "weight_packed")))
            assert read <= sizes[name] * (share + spare) + 1e-6, name
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("packing", [Packing.GPTQ, Packing.GPTQ_V2])
def test_the_order_of_groups_is_looked_at_in_a_part(packing: Packing) -> None:
    form, source = Int4Format(packing, 32), _Ordered()
    linears.take(source, form, "w", 64, 128, Part(64, 128, dim=1))
    source.order[70] = 0
    with pytest.raises(Exception, match="scatters groups"):
        linears.take(source, form, "w", 64, 128, Part(64, 128, dim=1))


class _Ordered(CountedTensors):
    def __init__(self) -> None:
        super().__init__()
        self.order = torch.arange(128).int() // 32
        self.all["w.g_idx"] = self.order

    def __contains__(self, name: str) -> bool:
        return True
