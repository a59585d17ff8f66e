"""Keys and values beyond the range of float16 saturate: no row that must not see them changes, and none becomes NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from tests.unit.engine.driver import COMPILED_KERNELS, Driver, skip_unless_runnable, tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

FLOAT16_MAX = 65504.0
PAGE_SIZE = 16
LOUD_TOKEN = VOCAB_SIZE - 1
QUIET = tokens_of(11, 40, LOUD_TOKEN)
PREFIX = QUIET[:PAGE_SIZE]
PROMPT = [*PREFIX, LOUD_TOKEN, *QUIET[PAGE_SIZE:]]  # the loud token follows the first page
CHUNKS = (1, 3, 13, 15, 16, 17, 18, len(PROMPT))


def _write_model(projection: str, folder: Path) -> None:
    """One token alone has keys or values, in the first layer, that float16 cannot hold."""
    model: Any = tiny_model("qwen2, one query head per kv head", folder)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 0.0
        embedding[LOUD_TOKEN] = 0.0
        embedding[LOUD_TOKEN, 0] = 1.0
        getattr(model.model.layers[0].self_attn, projection).weight[:, 0] *= 1e6
    model.save_pretrained(folder)


@pytest.mark.parametrize("kernels", [*COMPILED_KERNELS, "torch"])
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_what_float16_cannot_hold_saturates_and_spoils_no_other_row(
    projection: str, kernels: str, tmp_path: Path
) -> None:
    skip_unless_runnable(kernels)
    _write_model(projection, tmp_path)
    driver = Driver(tmp_path, page_size=PAGE_SIZE, kernels=kernels, kv_cache_dtype="float16")
    driver.prefill(0, QUIET, range(4))
    assert float(driver.engine.cache.store.abs().max()) < FLOAT16_MAX, "only the loud token overflows"
    alone = driver.logits[0][0]
    spoken = []
    for chunk in CHUNKS:
        driver.engine.cache.store[10:14].zero_()
        driver.prefill(1, PROMPT, range(10, 14), chunk=chunk)
        assert float(driver.engine.cache.store[10:14].abs().max()) == FLOAT16_MAX
        driver.decode([1], 3)
        spoken.append(torch.stack(driver.logits[1]))
        joins = [driver.join(2, [10, 20, 21], prompt_len=len(QUIET), kv_len=PAGE_SIZE)]
        row = ExtendRow(2, QUIET[PAGE_SIZE:], PAGE_SIZE, True)
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[row])
        assert torch.equal(driver.logits[2][0], alone), (
            f"rows before the loud token differ, chunks of {chunk}"
        )
    driver.close()
    assert spoken[0].isfinite().all()
    for chunk, found in zip(CHUNKS, spoken, strict=True):
        assert torch.equal(found, spoken[0]), f"rows after the loud token differ, chunks of {chunk}"
