"""Keys and values in 8 bits: what is kept is rounded once, and everything that reads pages reads that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.checkpoint.kv_cache import KVLayout, kv_format, page_bytes
from tests.fetcher_contract import PAGE_SIZES, kv_format_of
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model
from tests.waiting import until

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
RELATIVE_GAP_MAX = 4e-5  # as in float32, see test_model_families
FAMILIES = ("llama, biases, llama3 rope, inner size 1100", "qwen3, qk-norm, head_dim 40", "olmo2")
PAGE_SIZE = 16
PROMPT = tokens_of(4, 40, VOCAB_SIZE)
ROUNDED = "segue_tests_rounded_kv"


def _rounded_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: object, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """transformers' interface, for whole prompts: q, k, v [1, heads, rows, head_dim], keys and values rounded."""
    k, v = (each.clamp(-LARGEST, LARGEST).to(E4M3).float() for each in (k, v))
    groups = module.num_key_value_groups
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    AttentionInterface.register(ROUNDED, _rounded_attention)
    yield
    AttentionInterface._global_mapping.pop(ROUNDED)


def gaps(driver: Driver, model: PreTrainedModel, attention: str) -> list[float]:
    """Largest difference of each row's logits from transformers', of its largest logit."""
    model.set_attn_implementation(attention)
    with torch.inference_mode():
        found = model(torch.tensor([[*PROMPT, *driver.tokens[0][:-1]]])).logits[0, len(PROMPT) - 1 :]
    return [
        float((logits - row).abs().max() / row.abs().max())
        for logits, row in zip(driver.logits[0], found, strict=True)
    ]


def in_8_bits(folder: Path, **settings: Any) -> Driver:
    return Driver(folder, device="cuda-on-cpu", kv_cache_dtype="fp8_e4m3", slots=4, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_reads_keys_and_values_as_transformers_would_round_them(
    family: str, tmp_path: Path
) -> None:
    """In float32 two sums differ in the last bits, and a few keys are then rounded to the next number of e4m3.

    So most rows are compared tightly, not all.
    """
    model = tiny_model(family, tmp_path)
    driver = in_8_bits(tmp_path)
    driver.prefill(0, PROMPT, range(4), chunk=17)
    driver.decode([0], 12)
    driver.close()
    assert driver.engine.cache.store.dtype == E4M3
    assert median(gaps(driver, model, ROUNDED)) < RELATIVE_GAP_MAX
    assert min(gaps(driver, model, "eager")) > 10 * RELATIVE_GAP_MAX, "rounding is seen"
    assert len(set(driver.tokens[0])) > 2, "a model that repeats one token shows little"


def test_pages_take_half_and_are_nothing_to_workers_with_others(tmp_path: Path) -> None:
    tiny_model(FAMILIES[1], tmp_path)
    drivers = [
        Driver(tmp_path, device="cuda-on-cpu", slots=4, dtype="bfloat16"),
        in_8_bits(tmp_path, dtype="bfloat16"),
    ]
    for driver in drivers:
        driver.close()
    wide, narrow = (driver.engine for driver in drivers)
    assert wide.cache.page_bytes == 2 * narrow.cache.page_bytes
    assert wide.memory["kv"] == 2 * narrow.memory["kv"]
    assert (
        narrow.kv_format == kv_format(narrow.config, PAGE_SIZE, E4M3, narrow.cache.layout) != wide.kv_format
    )
    assert narrow.determinism != wide.determinism
    assert narrow.model_fingerprint == wide.model_fingerprint


def test_a_prefix_from_host_pages_gives_the_same_logits(tmp_path: Path) -> None:
    tiny_model(FAMILIES[0], tmp_path)
    driver = in_8_bits(tmp_path)
    driver.prefill(0, PROMPT, range(4), chunk=2 * PAGE_SIZE)
    alone = driver.logits[0][0]
    driver.device.start_backup(1, [0, 1], [3, 4])
    driver.device.start_restore(2, [3, 4], [20, 21])
    until(lambda: 2 in driver.device.copies_done(), 10, "the copies, which no step waits for")
    rest = PROMPT[2 * PAGE_SIZE :]
    joins = [driver.join(1, [20, 21, 22], prompt_len=len(PROMPT), kv_len=2 * PAGE_SIZE)]
    row = ExtendRow(1, rest, 2 * PAGE_SIZE, True)
    driver.run(ForwardMode.EXTEND, joins=joins, extend=[row])
    store = driver.engine.cache.store
    assert torch.equal(store[20:22].view(torch.uint8), store[:2].view(torch.uint8))
    assert bool(store[20:22].float().any())
    torch.testing.assert_close(driver.logits[1][0], alone, rtol=1e-4, atol=1e-4)
    driver.close()


@pytest.mark.parametrize("dtype", PAGE_SIZES)
def test_the_pages_that_tests_of_transfer_move_are_those_of_a_cache(dtype: str) -> None:
    shape = SimpleNamespace(layers=4, kv_heads=2, head_dim=128)
    numbers = getattr(torch, dtype)
    assert page_bytes(shape, PAGE_SIZE, numbers) == PAGE_SIZES[dtype]
    assert kv_format(shape, PAGE_SIZE, numbers, KVLayout.KEYS_BY_TOKEN) == kv_format_of(dtype)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_what_8_bits_cannot_hold_saturates(projection: str, tmp_path: Path) -> None:
    model: Any = tiny_model("qwen2, one query head per kv head", tmp_path)
    with torch.no_grad():
        getattr(model.model.layers[0].self_attn, projection).weight.mul_(1e4)
    model.save_pretrained(tmp_path)
    driver = in_8_bits(tmp_path)
    driver.prefill(0, PROMPT, range(4))
    driver.decode([0], 2)
    driver.close()
    assert float(driver.engine.cache.store.float().abs().max()) == LARGEST
    assert torch.stack(driver.logits[0]).isfinite().all()
