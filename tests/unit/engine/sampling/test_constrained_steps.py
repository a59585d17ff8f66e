"""Grammars on both devices, a step launched ahead: each token waits for the mask that the token before makes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch
from shared.engine.cpu.torch_device import TorchDevice
from shared.engine.cuda.device import CudaDevice
from shared.engine.sampling.grammars import Matcher
from shared.engine.sampling.masks import Constraints, MaskBudget
from shared.wire.grammar import Grammar
from shared.wire.sampled import Sampled
from shared.wire.sampling_params import SamplingParams
from tests.simulation.oracle.toy_grammar import FIRM, FRAIL, allowed, fails, state_of
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.late_requests import EOS, ReluctantBudget, ToyMatchers
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = tokens_of(2, 20, VOCAB_SIZE)
STEPS = 24
PAGES = 4


@pytest.fixture(params=["cpu", "cuda-on-cpu"])
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    tiny_model("mistral", tmp_path)
    driver = Driver(tmp_path, slots=8, device=request.param)
    use_matchers(driver, ToyMatchers())
    yield driver
    driver.close()


def use_matchers(driver: Driver, matchers: ToyMatchers) -> None:
    device = driver.device
    if isinstance(device, CudaDevice):
        device._sampling._masks._matchers = matchers
    else:
        assert isinstance(device, TorchDevice)
        before = device._sampler._constraints
        device._sampler._constraints = Constraints(matchers, VOCAB_SIZE, before._budget)


def run_ahead(
    driver: Driver,
    asked: Sequence[dict[str, Any]],
    *,
    matchers: ToyMatchers | None = None,
    tenants: Sequence[str] = (),
) -> list[Sampled]:
    """Requests of one prompt, a slot each, every step launched before the one before is waited for."""
    if matchers is not None:
        use_matchers(driver, matchers)
    joins = [
        driver.join(
            slot,
            range(PAGES * slot, PAGES * slot + PAGES),
            prompt_len=len(PROMPT),
            params=SamplingParams(max_new_tokens=64, seed=slot, **{"temperature": 1.0} | params),
            token_ids=PROMPT,
        )
        for slot, params in enumerate(asked)
    ]
    joins = [replace(join, tenant=tenant) for join, tenant in zip(joins, tenants or [""] * 9, strict=False)]
    slots = tuple(range(len(asked)))
    rows = tuple(ExtendRow(slot, PROMPT, 0, True) for slot in slots)
    device, first = driver.device, driver.step + 1
    device.launch(ScheduleBatch(first, ForwardMode.EXTEND, tuple(joins), extend=rows))
    sampled = []
    for step in range(first + 1, first + STEPS):
        device.launch(ScheduleBatch(step, ForwardMode.DECODE, decode_slots=slots))
        sampled.append(device.wait(step - 1))
    driver.step = first + STEPS - 1
    return [*sampled, device.wait(driver.step)]


def tokens_of_row(sampled: Sequence[Sampled], row: int) -> list[int]:
    return [step.token_ids[row] for step in sampled if row not in step.sat_out]


def limit_masks(driver: Driver, budget: MaskBudget) -> None:
    device = driver.device
    if isinstance(device, CudaDevice):
        device._sampling._masks._budget = budget
    else:
        assert isinstance(device, TorchDevice)
        device._sampler._constraints._budget = budget


class SlowClock:
    """What slow matchers have taken, in seconds."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowMatchers(ToyMatchers):
    """Matchers each of whose masks takes `seconds`."""

    def __init__(self, clock: SlowClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def matcher(self, grammar: Grammar) -> Matcher:
        matcher = super().matcher(grammar)
        real = matcher.compute_bitmask

        def compute_bitmask() -> bytes:
            self._clock.seconds += self._seconds
            return real()

        setattr(matcher, "compute_bitmask", compute_bitmask)  # noqa: B010 — it is a method
        return matcher


def assert_obeyed(tokens: Sequence[int]) -> None:
    for place, token in enumerate(tokens):
        assert token in allowed(state_of(tokens[:place]), VOCAB_SIZE) - EOS


def test_every_token_is_one_that_the_grammar_allows_behind_the_others(driver: Driver) -> None:
    sampled = run_ahead(driver, [{"grammar": FIRM}, {}, {"grammar": FIRM, "logprobs": 2}])
    for row in (0, 2):
        assert_obeyed(tokens_of_row(sampled, row))
    assert [set(step.logprobs) for step in sampled] == [{2}] * STEPS
    alone = run_ahead(driver, [{}, {}])
    assert tokens_of_row(sampled, 1) == tokens_of_row(alone, 1)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_rows_that_sit_out_get_the_tokens_that_they_would_have_got(driver: Driver, share: float) -> None:
    """With all that is kept between steps: history, masks, early ends, a seed, what is reported."""
    firm = {"grammar": FIRM, "temperature": 1.0, "logprobs": 1}
    penalized = firm | {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_new_tokens": 9}
    asked = [firm, {}, penalized, firm | {"bad_words": ((5, 9), (8,))}]
    expected = [tokens_of_row(run_ahead(driver, asked), row) for row in range(4)]
    limit_masks(driver, ReluctantBudget(random.Random(4), share))
    sampled = run_ahead(driver, asked)
    sat_out = [(step, row) for step, each in enumerate(sampled) for row in each.sat_out]
    assert len(sat_out) > STEPS * share / 2
    assert not any(row == 1 for _, row in sat_out)
    assert 0 not in {step for step, _ in sat_out}  # a prompt's last step takes the time it needs
    for row in range(4):
        tokens = tokens_of_row(sampled, row)
        assert len(tokens) == STEPS - sum(other == row for _, other in sat_out)
        assert tokens == expected[row][: len(tokens)]
    assert all(not step.logprobs.keys() & step.sat_out for step in sampled)


def test_masks_beyond_the_budget_of_their_tenant_wait(driver: Driver) -> None:
    """40 ms of masks a step, of which 5 may be taken: then an eighth of the rows gets a token each step."""
    clock = SlowClock()
    limit_masks(driver, MaskBudget(clock))
    matchers = SlowMatchers(clock, 0.01)
    slow = [{"grammar": FIRM}] * 4
    sampled = run_ahead(driver, [*slow, {}], matchers=matchers, tenants=["alice"] * 4 + ["bob"])
    for row in range(4):
        assert_obeyed(tokens_of_row(sampled, row))
    counts = [len(tokens_of_row(sampled, row)) for row in range(5)]
    assert counts[4] == STEPS
    assert sum(counts[:4]) <= 4 + STEPS / 2 + 1
    assert max(counts[:4]) - min(counts[:4]) <= 1
    assert all(sum(step.mask_seconds.values()) <= 0.011 for step in sampled[1:])


def test_a_row_that_cannot_go_on_is_named_once_and_its_neighbours_go_on(driver: Driver) -> None:
    """What follows in its slot is discarded, and free."""
    sampled = run_ahead(driver, [{"grammar": FIRM}, {"grammar": FRAIL}, {"grammar": FRAIL}])
    for row in (1, 2):
        tokens = tokens_of_row(sampled, row)
        failed_at = [place for place, step in enumerate(sampled) if row in step.failed]
        expected = next((at for at in range(STEPS) if fails(FRAIL, state_of(tokens[:at]))), None)
        assert failed_at == ([] if expected is None else [expected])
        assert_obeyed(tokens[:expected])
    assert any(step.failed for step in sampled)
    assert not any(0 in step.failed for step in sampled)
    assert_obeyed(tokens_of_row(sampled, 0))


def test_a_slot_that_is_given_away_does_not_hear_of_its_last_token(driver: Driver) -> None:
    """The next request joins while the last step of the one before is under way."""
    device, params = driver.device, SamplingParams(max_new_tokens=64, seed=3, temperature=1.0, grammar=FIRM)
    row = (ExtendRow(0, PROMPT, 0, True),)

    def join() -> Any:
        return driver.join(0, range(PAGES), prompt_len=len(PROMPT), params=params, token_ids=PROMPT)

    batches: list[dict[str, Any]] = [
        {"mode": ForwardMode.EXTEND, "joins": (join(),), "extend": row},
        {"mode": ForwardMode.DECODE, "decode_slots": (0,)},
        {"mode": ForwardMode.EXTEND, "joins": (join(),), "extend": row},
        {"mode": ForwardMode.DECODE, "decode_slots": (0,)},
    ]
    for step, batch in enumerate(batches, 1):
        device.launch(ScheduleBatch(step, **batch))
    one, two, again, then = (device.wait(step).token_ids[0] for step in range(1, 5))
    assert (again, then) == (one, two)


def test_a_grammar_that_nobody_can_compile_breaks_its_step(driver: Driver) -> None:
    """An error of the host's part is the step's, and `wait` for the step before is not troubled by it."""

    class Broken(ToyMatchers):
        def matcher(self, grammar: Grammar) -> Any:
            matcher = super().matcher(grammar)
            setattr(matcher, "compute_bitmask", lambda: 1 // 0)  # noqa: B010 — it is a method
            return matcher

    device = driver.device
    use_matchers(driver, Broken())
    driver.prefill(1, PROMPT, range(8, 12))
    params = SamplingParams(max_new_tokens=64, seed=3, temperature=1.0, grammar=FIRM)
    join = driver.join(0, range(PAGES), prompt_len=len(PROMPT), params=params, token_ids=PROMPT)
    steps = driver.step
    device.launch(ScheduleBatch(steps + 1, ForwardMode.DECODE, decode_slots=(1,)))
    device.launch(
        ScheduleBatch(steps + 2, ForwardMode.EXTEND, (join,), extend=(ExtendRow(0, PROMPT, 0, True),))
    )
    assert len(device.wait(steps + 1).token_ids) == 1
    with pytest.raises(ZeroDivisionError):
        device.wait(steps + 2)
