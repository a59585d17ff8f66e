"""A request of a mixture of experts is retracted, or goes on at another worker, and gets what it gets undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.schedule_batch import ExtendRow, ForwardMode
from shared.transfer.protocol import FetchLanded
from shared.transfer.transfer import Transfer
from shared.wire.baton import Baton
from shared.worker.page_memory import page_memory
from tests.doubles.in_process_transfer import InProcessFabric, InProcessOffer
from tests.fetcher_contract import LEASES, LIMITS
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.experts.expert_models import EXPERT_FAMILIES
from tests.unit.engine.experts.test_expert_families import DEVICES, RELATIVE_GAP_MAX
from tests.unit.engine.tiny_models import VOCAB_SIZE, save_model
from tests.waiting import until

PROMPT, OTHER = tokens_of(1, 70, VOCAB_SIZE), tokens_of(2, 80, VOCAB_SIZE)
BEFORE, AFTER = 5, 6  # tokens
PAGES, ELSEWHERE = range(6), range(20, 26)


@pytest.fixture(scope="module", params=DEVICES, ids=str)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module", params=EXPERT_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family; gpt-oss has sinks and windows."""
    made = tmp_path_factory.mktemp("model")
    save_model(EXPERT_FAMILIES[request.param], made)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path, settings: dict[str, Any]) -> Driver:
    """What slot 0 of an engine had undisturbed; it is closed."""
    driver = begun(folder, settings)
    driver.decode([0], AFTER)
    driver.close()
    return driver


def begun(folder: Path, settings: dict[str, Any]) -> Driver:
    """An engine whose first slot has the prompt and some tokens."""
    driver = Driver(folder, slots=8, **settings)
    driver.prefill(0, PROMPT, PAGES)
    driver.decode([0], BEFORE)
    return driver


def go_on(driver: Driver, pages: Sequence[int], tokens: list[int], beside: Sequence[int] = ()) -> None:
    """The request decodes in slot 5 from these pages, which have the keys and values of all tokens but the last."""
    kv_len = len(PROMPT) + len(tokens) - 1
    joins = [driver.join(5, pages, prompt_len=len(PROMPT), kv_len=kv_len, last_token=tokens[-1])]
    driver.run(ForwardMode.PREBUILT, joins=joins)
    driver.decode([*beside, 5], AFTER)


def assert_undisturbed(driver: Driver, alone: Driver, settings: dict[str, Any]) -> None:
    """The CPU engine gives the same bits; by the path of a GPU products have other rows, and sums other last bits."""
    driver.close()
    expected = alone.logits[0][-AFTER:]
    assert driver.tokens[5] == alone.tokens[0][-AFTER:]
    assert len(set(alone.tokens[0])) > 1
    for found, wanted in zip(driver.logits[5], expected, strict=True):
        if settings.get("device") == "cuda-on-cpu":
            assert float((found - wanted).abs().max() / wanted.abs().max()) < RELATIVE_GAP_MAX
        else:
            assert torch.equal(found, wanted)


def test_a_retracted_request_is_computed_again(folder: Path, settings: dict[str, Any], alone: Driver) -> None:
    """In chunks and on other pages, with others in the batch, when another request has had its own."""
    driver = begun(folder, settings)
    tokens = driver.tokens[0]
    driver.prefill(1, OTHER, PAGES)
    joins, again = [driver.join(5, ELSEWHERE, prompt_len=len(PROMPT))], [*PROMPT, *tokens[:-1]]
    for start in range(0, len(again), 33):
        row = ExtendRow(5, again[start : start + 33], start, False)
        driver.run(ForwardMode.EXTEND, joins=joins, extend=[row])
        joins = []
        driver.decode([1], 1)
    go_on(driver, ELSEWHERE, tokens, beside=[1])
    assert_undisturbed(driver, alone, settings)


def test_a_retracted_request_comes_back_from_host_pages(
    folder: Path, settings: dict[str, Any], alone: Driver
) -> None:
    driver = begun(folder, settings)
    host = range(len(PAGES))
    driver.device.start_backup(1, PAGES, host)
    _until_copied(driver, 1)  # before that the pages are nobody else's
    driver.prefill(1, OTHER, PAGES)
    driver.device.start_restore(2, host, ELSEWHERE)
    _until_copied(driver, 2)
    go_on(driver, ELSEWHERE, driver.tokens[0], beside=[1])
    assert_undisturbed(driver, alone, settings)


def _until_copied(driver: Driver, copy_id: int) -> None:
    until(lambda: copy_id in driver.device.copies_done(), 10, f"copy {copy_id}")


def test_a_request_goes_on_at_another_worker(folder: Path, settings: dict[str, Any], alone: Driver) -> None:
    """By a transfer, of pages that its own engine then loses."""
    fabric, clock = InProcessFabric(), lambda: 0.0
    source, target = begun(folder, settings), Driver(folder, slots=8, **settings)
    assert source.engine.kv_format == target.engine.kv_format
    assert source.engine.model_fingerprint == target.engine.model_fingerprint
    transfers = []
    for uid, driver in (("source", source), ("target", target)):
        memory = page_memory(driver.engine.cache)
        offer = InProcessOffer(fabric, uid, 1, memory, LEASES)
        transfers.append(Transfer(offer, memory, driver.engine.kv_format, limits=LIMITS, clock=clock))
    holder, reader = transfers
    nonce = holder.words.open(3, PAGES)
    baton = Baton("r", 0, holder.holder, source.engine.kv_format, 3, nonce, 1, 1, tuple(PAGES))
    reader.start(1, baton, 0, ELSEWHERE)
    events = [event for _ in range(100) for event in reader.poll()]
    assert [type(event) for event in events] == [FetchLanded]
    source.engine.cache.store[:] = torch.nan
    target.prefill(1, OTHER, PAGES)
    go_on(target, ELSEWHERE, source.tokens[0], beside=[1])
    source.close()
    assert_undisturbed(target, alone, settings)
