"""Logprobs of a prompt's tokens on a real engine: torch's log-softmax, and the same bits however the prompt is cut.

On a CPU by the path of a GPU they are the same up to rounding: it promises no bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch
from shared.engine.sampling.logprobs import SCORES_A_RUN, joined_runs, scored_runs
from shared.wire.sampled import Sampled, TokenLogprobs
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.late_requests import assert_alike
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = tokens_of(1, 200, VOCAB_SIZE)
ASKS = SamplingParams(max_new_tokens=4, seed=0, temperature=0.0, prompt_logprobs=2)


SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "torch": {"kernels": "torch"},
    "path of a GPU": {"device": "cuda-on-cpu"},
}


@pytest.fixture(scope="module", params=SETTINGS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model("mistral", folder)
    driver = Driver(folder, kv_cache_dtype="float32", **SETTINGS[request.param])
    yield driver
    driver.close()


def scored_row(slot: int, prompt: Sequence[int], start: int, end: int) -> ExtendRow:
    return ExtendRow(slot, prompt[start:end], start, end == len(prompt), prompt[start + 1 : end + 1])


def step(driver: Driver, extend: Sequence[ExtendRow], *, join: bool) -> Sampled:
    """One step of rows, each of which asks for the scores that it names."""
    driver.step += 1
    joins = [
        driver.join(row.slot, range(14 * row.slot, 14 * row.slot + 14), prompt_len=len(PROMPT), params=ASKS)
        for row in extend
    ]
    batch = ScheduleBatch(
        driver.step, ForwardMode.EXTEND, joins=tuple(joins) if join else (), extend=tuple(extend)
    )
    driver.device.launch(batch)
    return driver.device.wait(driver.step)


def assert_same(driver: Driver, scores: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Bit by bit where bits are promised."""
    if "path of a GPU" in driver.engine.description:
        assert_alike(scores, expected)
    else:
        assert list(scores) == list(expected)


@pytest.fixture(scope="module")
def whole(driver: Driver) -> Sampled:
    return step(driver, [scored_row(0, PROMPT, 0, len(PROMPT))], join=True)


def test_each_token_has_the_logprob_that_a_request_sampling_there_would_see(
    driver: Driver, whole: Sampled
) -> None:
    assert len(whole.scored[0]) == len(PROMPT) - 1 > 2 * SCORES_A_RUN
    for length in (1, 63, 64, 65, 150, 199):
        driver.prefill(1, PROMPT[:length], range(100, 114))
        expected = driver.logits[1][0].double().log_softmax(-1)
        told = whole.scored[0][length - 1]
        assert abs(told.logprob - expected[PROMPT[length]].item()) < 1e-5
        assert [token_id for token_id, _ in told.top] == expected.topk(2).indices.tolist()


@pytest.mark.parametrize("chunk", [1, 16, 64, 65, 100])
def test_chunks_change_no_bit(driver: Driver, whole: Sampled, chunk: int) -> None:
    scores: list[TokenLogprobs] = []
    for start in range(0, len(PROMPT), chunk):
        row = scored_row(2, PROMPT, start, min(start + chunk, len(PROMPT)))
        sampled = step(driver, [row], join=start == 0)
        scores += sampled.scored.get(0, ())
    assert_same(driver, scores, whole.scored[0])
    assert sampled.token_ids == whole.token_ids


def test_others_in_the_step_change_no_bit_and_keep_their_own(driver: Driver, whole: Sampled) -> None:
    other = tokens_of(2, 90, VOCAB_SIZE)
    rows = [
        ExtendRow(3, other, 0, samples=True),
        scored_row(4, PROMPT, 0, len(PROMPT)),
        scored_row(5, other, 0, len(other)),
        ExtendRow(6, other[:30], 0, samples=False),
    ]
    crowd = step(driver, rows, join=True)
    alone = step(driver, [scored_row(5, other, 0, len(other))], join=True)
    assert crowd.scored.keys() == {1, 2}
    assert_same(driver, crowd.scored[1], whole.scored[0])
    assert_same(driver, crowd.scored[2], alone.scored[0])
    assert crowd.token_ids == [*alone.token_ids, *whole.token_ids, *alone.token_ids]


def test_a_step_without_scores_is_one_run() -> None:
    rows = [ExtendRow(0, PROMPT, 0, samples=True), ExtendRow(1, PROMPT[:10], 0, samples=False)]
    assert list(scored_runs(rows)) == [list(enumerate(rows))]


@pytest.mark.parametrize("most", [1, 7, 64])
def test_runs_are_the_rows_in_their_order_with_few_scores_each(most: int) -> None:
    rows = [
        scored_row(0, PROMPT, 0, 70),
        ExtendRow(1, PROMPT, 0, samples=True),
        scored_row(2, PROMPT[:9], 0, 9),
    ]
    runs = list(scored_runs(rows, most))
    assert all(sum(len(row.scores) for _, row in run) <= most for run in runs)
    pieces = [piece for run in runs for piece in run]
    assert [place for place, _ in pieces] == sorted(place for place, _ in pieces)
    for place, whole_row in enumerate(rows):
        mine = [row for at, row in pieces if at == place]
        assert [token for row in mine for token in row.token_ids] == list(whole_row.token_ids)
        assert [score for row in mine for score in row.scores] == list(whole_row.scores)
        assert [row.samples for row in mine] == [False] * (len(mine) - 1) + [whole_row.samples]


def test_what_runs_bring_is_put_together_by_row() -> None:
    score, row = TokenLogprobs(-1.0), ExtendRow(0, PROMPT[:2], 0, samples=True)
    first = Sampled([5], {0: score}, {0: [score]}, {}, {0})
    second = Sampled([6, 7], {1: score}, {0: [score, score]}, {0: "no token"}, {1})
    joined = joined_runs([([(3, row)], first), ([(3, row), (4, row)], second)])
    assert joined == Sampled([5, 6, 7], {0: score, 2: score}, {3: [score] * 3}, {1: "no token"}, {0, 2})
