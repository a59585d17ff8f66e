"""A device of two ranks, of which this process is the first: it does what a device of one rank does.

Suites with one device run so by `SEGUE_TEST_RANKS=2` (docs/testing.md); here is what is particular to ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from shared.batch.schedule_batch import ForwardMode, ScheduleBatch
from shared.engine.cuda.device import CudaDevice
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.late_requests import LateModel, ReluctantBudget
from tests.unit.engine.test_mixed_steps import PAGES_PER_SLOT, SLOTS, MixedBench
from tests.unit.engine.tiny_models import VOCAB_SIZE
from tests.waiting import comes_true

SEEDS = 2
PROMPT = tokens_of(2, 20, VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LateModel:
    return LateModel(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def driver(model: LateModel) -> Iterator[Driver]:
    """Of two ranks."""
    pages = PAGES_PER_SLOT * SLOTS
    driver = Driver(model.folder, pages=pages, slots=SLOTS, device="cuda-on-cpu", ranks=2, host_fraction=0.5)
    yield driver
    driver.close()


def test_requests_of_every_kind_get_the_tokens_of_one_rank(driver: Driver, model: LateModel) -> None:
    """Grammars, penalties, logprobs, scored prompts and filters, in steps of each mode."""
    assert "2 ranks" in driver.engine.description
    bench = MixedBench(driver)
    for seed in range(SEEDS):
        drawn = random.Random(seed)
        bench.limit_masks(ReluctantBudget(drawn, 0.3))
        chosen = [drawn.choice(model.requests) for _ in range(12)]
        for own, wanted in zip(bench.serve(drawn, chosen), chosen, strict=True):
            assert own.tokens == list(wanted.tokens)
    assert min(bench.seen[what] for what in ("mixed", "scored", "ended", "sat out beside prompts"))


def test_steps_launched_ahead_take_the_tokens_of_their_own_step(driver: Driver) -> None:
    """More of them than an order's ring has buffers, and the slots change from step to step."""
    slots, steps = (0, 1, 2), 24
    pages = [range(PAGES_PER_SLOT * slot, PAGES_PER_SLOT * (slot + 1)) for slot in slots]
    for slot in slots:
        driver.prefill(slot, PROMPT[slot:], pages[slot])
        driver.decode([slot], 16)
    alone = {slot: list(driver.tokens[slot]) for slot in slots}
    for slot in slots:
        driver.prefill(slot, PROMPT[slot:], pages[slot])
    modes = [tuple(slot for slot in slots if (step + slot) % 3) for step in range(steps)]
    first = driver.step + 1
    for step, rows in enumerate(modes, first):
        driver.device.launch(ScheduleBatch(step, ForwardMode.DECODE, decode_slots=rows))
    for step, rows in enumerate(modes, first):
        for slot, token in zip(rows, driver.device.wait(step).token_ids, strict=True):
            driver.tokens[slot].append(token)
    driver.step += steps
    assert {slot: driver.tokens[slot] for slot in slots} == alone


def test_a_request_goes_on_from_pages_that_came_back_from_the_host(driver: Driver) -> None:
    """Of each rank its own part."""
    device = driver.device
    assert isinstance(device, CudaDevice)
    driver.prefill(0, PROMPT, range(4))
    driver.decode([0], 12)
    expected = list(driver.tokens[0])
    driver.prefill(0, PROMPT, range(4))
    device.start_backup(1, [0, 1], [0, 1])
    driver.prefill(1, PROMPT[::-1], range(PAGES_PER_SLOT, 2 * PAGES_PER_SLOT))
    wait_for_copy(device, 1)
    driver.prefill(1, PROMPT[::-1], range(4))  # over the pages
    device.start_restore(2, [0, 1], [5, 6])
    join = driver.join(2, [5, 6, 7, 8], prompt_len=len(PROMPT), kv_len=len(PROMPT), last_token=expected[0])
    driver.run(ForwardMode.PREBUILT, joins=[join])
    wait_for_copy(device, 2)
    driver.decode([2], 12)
    assert driver.tokens[2] == expected[1:]


def wait_for_copy(device: CudaDevice, copy_id: int) -> None:
    assert comes_true(lambda: device.copies_done() == [copy_id], 30.0)


def test_an_order_that_a_follower_cannot_do_ends_it_with_a_sentence(driver: Driver) -> None:
    """The last one that is asked of this device."""
    ranks = driver.ranks
    assert ranks is not None
    ranks.group.end.copy(1, [10**6], [0], backup=True)
    lost = ranks.lost.get(timeout=30)
    assert (lost.rank, lost.status, lost.refused) == (1, 1, False)
    assert lost.reason.startswith("IndexError: index 1000000 is out of bounds")
