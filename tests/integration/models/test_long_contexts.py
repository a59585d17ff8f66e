"""The cut model at a context of 4,000 tokens: the same bits in chunks, from a cache, in a crowd of 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from tests.integration.deployments.cut_model import cut_model
from tests.unit.engine.driver import Driver, tokens_of

LENGTH = 4_000
PAGE_SIZE = 16
STEPS = 4
SLOTS = 64
HOME, ELSEWHERE = range(256), range(256, 512)  # pages


@pytest.fixture(scope="module")
def folder() -> Path:
    return cut_model()


@pytest.fixture(scope="module", params=["float16", "float32"])
def driver(folder: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(folder, pages=700, slots=SLOTS, threads=2, kv_cache_dtype=request.param)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def prompt(driver: Driver) -> list[int]:
    return tokens_of(LENGTH, LENGTH, driver.engine.config.vocab_size)


@pytest.fixture(scope="module")
def alone(driver: Driver, prompt: list[int]) -> list[Tensor]:
    """Logits of a prefill of the whole prompt in one step, and of some decode steps."""
    driver.prefill(0, prompt, HOME)
    driver.decode([0], STEPS)
    return driver.logits[0]


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [logits.isfinite().all() for logits in expected] == [True] * (STEPS + 1)
    assert len({logits.numpy().tobytes() for logits in expected}) == STEPS + 1
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"output {index} differs by {float((one - other).abs().max()):.1e}"


@pytest.mark.parametrize("chunk", [16, 64, 1_500])
@pytest.mark.long
def test_chunks_on_scattered_pages_change_no_bit(
    driver: Driver, prompt: list[int], alone: list[Tensor], chunk: int
) -> None:
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(chunk)) + 256
    driver.prefill(1, prompt, shuffled.tolist(), chunk=chunk)
    driver.decode([1], STEPS)
    assert_same_bits(driver.logits[1], alone)


@pytest.mark.long
def test_a_cached_prefix_and_a_crowd_of_64_change_no_bit(
    driver: Driver, prompt: list[int], alone: list[Tensor]
) -> None:
    driver.prefill(0, prompt, HOME)
    others = range(1, SLOTS)
    for slot in others:
        driver.prefill(slot, tokens_of(slot, 5 + slot % 20, 1_000), [512 + 2 * slot, 513 + 2 * slot])
    cached = (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    pages = [*HOME[: cached // PAGE_SIZE], *range(640, 650)]
    joins = [driver.join(0, pages, prompt_len=len(prompt), kv_len=cached)]
    driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, prompt[cached:], cached, True)])
    driver.decode([*others[:30], 0, *others[30:]], STEPS)
    assert_same_bits(driver.logits[0], alone)


@pytest.mark.long
def test_one_thread_changes_no_bit(
    folder: Path, driver: Driver, prompt: list[int], alone: list[Tensor]
) -> None:
    single = Driver(folder, pages=256, threads=1, kv_cache_dtype=driver.kv_cache_dtype)
    single.prefill(0, prompt, HOME, chunk=2_048)
    single.decode([0], STEPS)
    single.close()
    assert_same_bits(single.logits[0], alone)
