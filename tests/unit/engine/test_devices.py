"""Both devices keep order, surface errors, and never wait for the CPU to know a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode, PageGrant, ScheduleBatch
from shared.primitives.errors import InvariantError
from shared.scheduling.device import Device
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = tokens_of(2, 20, VOCAB_SIZE)


@pytest.fixture(params=["cpu", "cuda-on-cpu"])
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    tiny_model("mistral", tmp_path)
    driver = Driver(tmp_path, device=request.param)
    yield driver
    driver.close()


def test_steps_may_be_launched_before_their_tokens_are_known(driver: Driver) -> None:
    driver.prefill(0, PROMPT, range(4))
    driver.decode([0], 8)
    expected = list(driver.tokens[0])
    device: Device = driver.device
    first = driver.step + 1
    joins = (driver.join(1, range(10, 12), prompt_len=len(PROMPT)),)
    device.launch(ScheduleBatch(first, ForwardMode.EXTEND, joins, extend=(ExtendRow(1, PROMPT, 0, True),)))
    grants = {first + 4: (PageGrant(1, (12, 13)),)}
    for step in range(first + 1, first + 9):
        device.launch(ScheduleBatch(step, ForwardMode.DECODE, grants=grants.get(step, ()), decode_slots=(1,)))
    assert [device.wait(step).token_ids for step in range(first, first + 9)] == [
        [token] for token in expected
    ]
    assert device.completed() == first + 8


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_layer_of_a_step_counts_as_work(tmp_path: Path, kernels: str) -> None:
    tiny_model("mistral", tmp_path)
    driver = Driver(tmp_path, kernels=kernels)
    layers, before = driver.engine.config.layers, driver.device.work_done
    driver.prefill(0, PROMPT, range(4))
    assert driver.device.work_done == before + layers
    driver.decode([0], 3)
    assert driver.device.work_done == before + 4 * layers
    driver.close()


def test_a_step_tells_how_long_it_took(driver: Driver) -> None:
    driver.prefill(0, PROMPT, range(4))
    driver.step += 1
    began_at = time.perf_counter()
    driver.device.launch(ScheduleBatch(driver.step, ForwardMode.DECODE, decode_slots=(0,)))
    sampled = driver.device.wait(driver.step)
    assert 0 < sampled.seconds <= time.perf_counter() - began_at


def test_only_rows_that_sample_have_results(driver: Driver) -> None:
    joins = [driver.join(slot, range(4 * slot, 4 * slot + 4), prompt_len=20) for slot in (0, 1, 2)]
    rows = [ExtendRow(0, PROMPT, 0, True), ExtendRow(1, PROMPT[:7], 0, False), ExtendRow(2, PROMPT, 0, True)]
    sampled = driver.run(ForwardMode.EXTEND, joins=joins, extend=rows)
    assert len(sampled) == 2
    assert sampled[0] == sampled[1]
    assert driver.run(ForwardMode.EXTEND, extend=[ExtendRow(1, PROMPT[7:], 7, True)]) == sampled[:1]


def test_a_step_of_middle_chunks_alone_samples_nothing(driver: Driver) -> None:
    joins = [driver.join(0, range(4), prompt_len=20)]
    assert driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, PROMPT[:5], 0, False)]) == []


def test_a_request_without_pages_is_an_error_of_its_step_and_of_all_later_ones(driver: Driver) -> None:
    joins = [driver.join(0, range(1), prompt_len=20)]
    with pytest.raises(InvariantError, match="fewer pages than tokens"):
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, PROMPT, 0, True)])
    with pytest.raises(InvariantError, match="fewer pages than tokens"):
        driver.run(ForwardMode.PREBUILT)
    with pytest.raises(InvariantError):
        driver.device.copies_done()
    assert driver.device.completed() == 0


def test_a_slot_forgets_the_pages_of_the_request_before(driver: Driver) -> None:
    driver.prefill(0, PROMPT, range(4))
    joins = [driver.join(0, range(1), prompt_len=20)]
    with pytest.raises(InvariantError, match="fewer pages than tokens"):
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, PROMPT, 0, True)])


def test_extending_elsewhere_than_at_the_end_is_refused(driver: Driver) -> None:
    joins = [driver.join(0, range(4), prompt_len=20, kv_len=3)]
    with pytest.raises(InvariantError, match="end of its cache"):
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, PROMPT, 0, True)])


def test_a_broken_copy_surfaces(driver: Driver) -> None:
    driver.device.start_backup(1, [5], [10_000])
    with pytest.raises((IndexError, InvariantError)):
        driver.run(ForwardMode.PREBUILT)
    with pytest.raises((IndexError, InvariantError)):
        driver.device.copies_done()


def test_steps_are_consecutive_and_waited_for_once(driver: Driver) -> None:
    with pytest.raises(InvariantError, match="step 5 was launched after step 0"):
        driver.device.launch(ScheduleBatch(5, ForwardMode.PREBUILT))
    driver.run(ForwardMode.PREBUILT)
    with pytest.raises(InvariantError, match="waited for"):
        driver.device.wait(1)


def test_more_pages_than_a_table_holds_are_refused(driver: Driver) -> None:
    joins = [driver.join(0, range(33), prompt_len=20)]
    with pytest.raises(InvariantError, match="a table holds 32"):
        driver.run(ForwardMode.PREBUILT, joins=joins)


@pytest.mark.parametrize(
    ("tokens", "pages", "message"),
    [
        ([VOCAB_SIZE, 1], [0, 1], "token 1 or [0-9]+ is not in 0 …"),
        ([1, -1], [0, 1], "token -1 or 1 is not in 0 …"),
        (PROMPT, [1, 128], "page 1 or 128 is not in 0 … 127"),
        (PROMPT, [-1, 3], "page -1 or 3 is not in 0 … 127"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_it_is_read_or_written(
    driver: Driver, tokens: list[int], pages: list[int], message: str
) -> None:
    """The compiled kernels look at no bound."""
    before = driver.engine.cache.store.clone()
    joins = [driver.join(0, pages, prompt_len=len(tokens))]
    with pytest.raises(InvariantError, match=message):
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[ExtendRow(0, tokens, 0, True)])
    assert torch.equal(driver.engine.cache.store, before)
