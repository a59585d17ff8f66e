"""A request's logits are the same bits however it is computed: alone, in a crowd, in chunks, from a cache, again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.engine.model.torch_ops import PackedLinear
from tests.unit.engine.driver import Driver, skip_unless_runnable, tokens_of
from tests.unit.engine.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

PROMPT = tokens_of(1, 300, VOCAB_SIZE)  # three blocks of attention, the last one partial
PAGES = range(22)
STEPS = 24
SINGLE = [1] * 20
# at the beginning, across a border of blocks and at the end
ONE_BY_ONE = [*SINGLE, 100, *SINGLE, 140, *SINGLE]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model(request.param, path)
    return path


# What computes, and in what type keys and values are kept.
SETTINGS = (
    {"kernels": "auto", "kv_cache_dtype": "float32"},
    {"kernels": "auto", "kv_cache_dtype": "float16"},
    {"kernels": "plain", "kv_cache_dtype": "float32"},
    {"kernels": "torch", "kv_cache_dtype": "float32"},
)


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda settings: "-".join(settings.values()))
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


@pytest.fixture(scope="module")
def driver(folder: Path, settings: dict[str, Any]) -> Iterator[Driver]:
    driver = Driver(folder, **settings)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def alone(driver: Driver) -> list[Tensor]:
    """Logits of every output position: one prefill of the whole prompt, then decode steps of one row."""
    driver.prefill(0, PROMPT, PAGES)
    driver.decode([0], STEPS)
    return driver.logits[0]


@pytest.fixture(scope="module")
def sequence(alone: list[Tensor]) -> list[int]:
    """The prompt and the tokens that follow it."""
    return [*PROMPT, *(int(logits.argmax()) for logits in alone)]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"output {index} differs by {float((one - other).abs().max()):.1e}"


@pytest.mark.parametrize("chunk", [1, 16, 21, 64, 128, 299])
def test_chunks_change_no_bit(driver: Driver, alone: list[Tensor], chunk: int) -> None:
    driver.prefill(1, PROMPT, range(30, 52), chunk, chunks=ONE_BY_ONE if chunk == 1 else ())
    assert_same_bits(driver.logits[1], alone[:1])


def test_a_crowd_changes_no_bit(driver: Driver, alone: list[Tensor]) -> None:
    others = {slot: tokens_of(slot, 3 + 17 * slot, VOCAB_SIZE) for slot in (2, 3, 4, 5, 6)}
    pages = {slot: range(15 * slot, 15 * slot + 15) for slot in others}
    joins = [driver.join(slot, pages[slot], prompt_len=len(tokens)) for slot, tokens in others.items()]
    joins.insert(3, driver.join(7, range(105, 127), prompt_len=len(PROMPT)))
    rows = [ExtendRow(slot, tokens, 0, True) for slot, tokens in others.items()]
    rows.insert(2, ExtendRow(7, PROMPT, 0, True))
    driver.run(ForwardMode.EXTEND, joins=joins, extend=rows)
    driver.decode([6, 2, 7, 3], STEPS // 2)
    driver.decode([7, 4, 5, 2, 3, 6], STEPS // 2)
    assert_same_bits(driver.logits[7], alone)


def test_tokens_once_decoded_may_be_extended_again(
    driver: Driver, alone: list[Tensor], sequence: list[int]
) -> None:
    for index in (0, 1, 7, 8, STEPS):
        driver.prefill(8, sequence[: len(PROMPT) + index], PAGES[::-1])
        assert_same_bits(driver.logits[8], alone[index : index + 1])


def test_pages_in_any_order_change_no_bit(driver: Driver, alone: list[Tensor]) -> None:
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(3)).tolist()[:22]
    driver.prefill(9, PROMPT, shuffled)
    driver.decode([9], STEPS)
    assert_same_bits(driver.logits[9], alone)


@pytest.mark.parametrize("cached", [16, 128, 144, 288])
def test_a_cached_prefix_changes_no_bit(driver: Driver, alone: list[Tensor], cached: int) -> None:
    donor = list(range(40, 62))
    driver.prefill(10, PROMPT, donor)
    kept = cached // 16
    pages = [*donor[:kept], *range(70, 92 - kept)]
    joins = [driver.join(11, pages, prompt_len=len(PROMPT), kv_len=cached)]
    driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(11, PROMPT[cached:], cached, True)])
    driver.decode([11], STEPS)
    assert_same_bits(driver.logits[11], alone)


def test_a_trip_through_host_memory_changes_no_bit(
    driver: Driver, alone: list[Tensor], sequence: list[int]
) -> None:
    source, target = list(range(22)), list(range(60, 82))
    driver.prefill(12, PROMPT, source)
    driver.device.start_backup(1, source, list(range(5, 27)))
    driver.device.start_restore(2, list(range(5, 27)), target)
    driver.prefill(13, tokens_of(9, 300, VOCAB_SIZE), source)  # the old pages hold something else by now
    joins = [
        driver.join(14, target, prompt_len=len(PROMPT), kv_len=len(PROMPT), last_token=sequence[len(PROMPT)])
    ]
    driver.run(ForwardMode.PREBUILT, joins=joins)
    driver.decode([14], STEPS)
    assert driver.device.copies_done() == [1, 2]
    assert_same_bits(driver.logits[14], alone[1:])


def test_a_join_in_the_decode_step_of_others_changes_no_bit(
    driver: Driver, alone: list[Tensor], sequence: list[int]
) -> None:
    pages = list(range(22))
    driver.prefill(0, PROMPT, pages)
    driver.prefill(1, tokens_of(9, 40, VOCAB_SIZE), range(100, 108))
    joins = [
        driver.join(2, pages, prompt_len=len(PROMPT), kv_len=len(PROMPT), last_token=sequence[len(PROMPT)])
    ]
    driver.run(ForwardMode.DECODE, joins=joins, decode_slots=[1, 2])
    driver.decode([1, 2], STEPS - 1)
    assert_same_bits(driver.logits[2], alone[1:])


def test_stale_cells_beyond_the_sequence_change_no_bit(driver: Driver, alone: list[Tensor]) -> None:
    driver.engine.cache.store[90:112].fill_(torch.nan)
    driver.prefill(15, PROMPT, range(90, 112))
    driver.decode([15], STEPS)
    assert_same_bits(driver.logits[15], alone)
    driver.engine.cache.store[90:112].zero_()


@pytest.mark.parametrize(("page_size", "threads"), [(32, 1), (64, 3), (16, 2)])
def test_page_size_and_threads_change_no_bit(
    folder: Path, settings: dict[str, Any], alone: list[Tensor], page_size: int, threads: int
) -> None:
    other = Driver(folder, page_size=page_size, pages=2048 // page_size, threads=threads, **settings)
    other.prefill(0, PROMPT, range(384 // page_size))
    other.decode([0], STEPS)
    other.close()
    assert_same_bits(other.logits[0], alone)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16"])
def test_fused_instruction_sets_compute_the_same_bits(folder: Path, kv_cache_dtype: str) -> None:
    names = ("avx512", "avx2")
    skip_unless_runnable(*names)
    found = []
    for kernels in names:
        driver = Driver(folder, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
        driver.prefill(0, PROMPT, PAGES, chunk=100)
        driver.decode([0], STEPS)
        driver.close()
        found.append(driver.logits[0])
    assert_same_bits(*found)


@pytest.mark.parametrize("inputs", [24, 576, 1024, 1025, 1536, 4096])
@pytest.mark.parametrize("outputs", [72, 257, 576])
def test_a_linear_row_does_not_depend_on_the_number_of_rows(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    linear = PackedLinear(weight, torch.randn(outputs, generator=generator))
    x = torch.randn(2048, inputs, generator=generator)
    expected = linear(x)
    for rows in (1, 2, 3, 7, 15, 16, 17, 33, 64, 100, 129, 257, 512, 1000):
        assert torch.equal(linear(x[:rows]), expected[:rows]), rows
        assert torch.equal(linear(x[-rows:]), expected[-rows:]), rows
