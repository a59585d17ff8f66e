"""Pages whose heads lie apart hold the same numbers as others, and each head's part of them is one row of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.schedule_batch import ForwardMode
from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts, kv_format, layout_on_cuda
from shared.engine.config import EngineConfig
from shared.engine.engine import load
from shared.primitives.errors import ConfigError
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.test_paged_batch import CONFIG
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PROMPTS = [tokens_of(seed, 20 + 13 * seed, VOCAB_SIZE) for seed in range(3)]


def run(folder: Path, layout: str, **settings: Any) -> tuple[Driver, list[torch.Tensor]]:
    """Chunks, a batch, and a stream that goes by host pages: its tokens and logits."""
    driver = Driver(folder, device="cuda-on-cpu", kv_layout=layout, slots=4, ranks=1, **settings)
    for slot, prompt in enumerate(PROMPTS):
        driver.prefill(slot, prompt, range(8 * slot, 8 * slot + 8), chunk=17)
    driver.decode(range(len(PROMPTS)), 4)
    held = len(PROMPTS[0]) + 4
    driver.engine.cache.backup([0, 1], [1, 0])
    driver.engine.cache.restore([1, 0], [40, 41])
    moved = driver.join(
        3, [40, 41, 42], prompt_len=len(PROMPTS[0]), kv_len=held, last_token=driver.tokens[0][-1]
    )
    driver.run(ForwardMode.DECODE, joins=[moved], decode_slots=[0, 3])
    driver.close()
    return driver, [torch.stack(driver.logits[slot]) for slot in range(4)]


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8_e4m3"}], ids=["as weights", "in 8 bits"])
def test_both_layouts_of_gpus_give_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model("qwen3, qk-norm, head_dim 40", tmp_path)
    together, logits = run(tmp_path, "auto", **settings)
    apart, others = run(tmp_path, "head-major-1", **settings)
    assert together.tokens == apart.tokens
    assert all(map(torch.equal, logits, others))
    assert together.tokens[0][-1] == together.tokens[3][-1], "by way of host pages"
    assert together.engine.kv_format.startswith("page-major-1,")
    assert apart.engine.kv_format == "head-major-1" + together.engine.kv_format.removeprefix("page-major-1")


def test_a_slice_is_all_that_a_page_has_of_a_head() -> None:
    cache = KVCache(CONFIG, PageCounts(3, host=1), page_size=4, layout=KVLayout.HEADS_APART)
    for layer in range(CONFIG.layers):
        cells = cache.paged_layer(layer)
        for head in range(CONFIG.kv_heads):
            cells[1, :, head] = 100 * head + layer + 1
    slices = cache.store[1].view(CONFIG.kv_heads, -1)
    for head, own in enumerate(slices):
        assert own.unique().tolist() == [100 * head + layer + 1 for layer in range(CONFIG.layers)]
    keys, values = cache.layer(1)
    assert keys.shape == values.shape == (3, CONFIG.kv_heads, 4, CONFIG.head_dim)
    assert torch.equal(keys, cache.paged_layer(1)[:, 0])
    assert torch.equal(values, cache.paged_layer(1)[:, 1])


def test_workers_of_several_ranks_have_heads_apart_and_of_one_as_is_asked_for() -> None:
    assert layout_on_cuda("auto", 1) is layout_on_cuda("page-major-1", 1) is KVLayout.KEYS_BY_TOKEN
    assert layout_on_cuda("auto", 2) is layout_on_cuda("head-major-1", 1) is KVLayout.HEADS_APART
    with pytest.raises(
        ConfigError, match=r"2 GPUs part them: set kv_layout to head-major-1, for all workers"
    ):
        layout_on_cuda("page-major-1", 2)
    assert kv_format(CONFIG, 16, torch.float16, KVLayout.HEADS_APART).startswith("head-major-1,page_size=16,")


def test_a_layout_of_gpus_is_refused_on_a_cpu(tmp_path: Path) -> None:
    config = EngineConfig(pages=8, page_size=16, slots=1, kv_layout="head-major-1")
    with pytest.raises(ConfigError, match="kv_layout head-major-1 is one of cuda"):
        load(tmp_path, config)
