"""Grammars on both devices, a step launched ahead: each token waits for the mask that the token before makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.engine.constraints import Constraints
from shared.engine.cuda.device import CudaDevice
from shared.engine.torch_device import TorchDevice
from shared.grammar import Grammar
from shared.sampled import Sampled
from shared.sampling_params import SamplingParams
from shared.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch
from tests.simulation.toy_grammar import FIRM, FRAIL, allowed, fails, state_of
from tests.unit.engine.driver import Driver, tokens_of
from tests.unit.engine.late_requests import EOS, ToyMatchers
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

PROMPT = tokens_of(2, 20, VOCAB_SIZE)
STEPS = 24
PAGES = 4


@pytest.fixture(params=["cpu", "cuda-on-cpu"])
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    tiny_model("mistral", tmp_path)
    driver = Driver(tmp_path, device=request.param)
    device = driver.device
    if isinstance(device, CudaDevice):
        device._sampling._masks._matchers = ToyMatchers()
    else:
        assert isinstance(device, TorchDevice)
        device._sampler._constraints = Constraints(ToyMatchers(), VOCAB_SIZE)
    yield driver
    driver.close()


def run_ahead(driver: Driver, asked: Sequence[dict[str, Any]]) -> list[Sampled]:
    """Requests of one prompt, a slot each, every step launched before the one before is waited for."""
    joins = [
        driver.join(
            slot,
            range(PAGES * slot, PAGES * slot + PAGES),
            prompt_len=len(PROMPT),
            params=SamplingParams(max_new_tokens=64, seed=slot, temperature=1.0, **params),
            token_ids=PROMPT,
        )
        for slot, params in enumerate(asked)
    ]
    slots = tuple(range(len(asked)))
    rows = tuple(ExtendRow(slot, PROMPT, 0, True) for slot in slots)
    device, first = driver.device, driver.step + 1
    device.launch(ScheduleBatch(first, ForwardMode.EXTEND, tuple(joins), extend=rows))
    sampled = []
    for step in range(first + 1, first + STEPS):
        device.launch(ScheduleBatch(step, ForwardMode.DECODE, decode_slots=slots))
        assert device.completed() < step
        sampled.append(device.wait(step - 1))
    driver.step = first + STEPS - 1
    return [*sampled, device.wait(driver.step)]


def tokens_in(sampled: Sequence[Sampled], row: int) -> list[int]:
    return [step.token_ids[row] for step in sampled]


def assert_obeyed(tokens: Sequence[int]) -> None:
    for place, token in enumerate(tokens):
        assert token in allowed(state_of(tokens[:place]), VOCAB_SIZE) - EOS


def test_every_token_is_one_that_the_grammar_allows_behind_the_others(driver: Driver) -> None:
    sampled = run_ahead(driver, [{"grammar": FIRM}, {}, {"grammar": FIRM, "logprobs": 2}])
    for row in (0, 2):
        assert_obeyed(tokens_in(sampled, row))
    assert [set(step.logprobs) for step in sampled] == [{2}] * STEPS
    alone = run_ahead(driver, [{}, {}])
    assert tokens_in(sampled, 1) == tokens_in(alone, 1)


def test_a_row_that_cannot_go_on_is_named_once_and_its_neighbours_go_on(driver: Driver) -> None:
    """What follows in its slot is discarded, and free."""
    sampled = run_ahead(driver, [{"grammar": FIRM}, {"grammar": FRAIL}, {"grammar": FRAIL}])
    for row in (1, 2):
        tokens = tokens_in(sampled, row)
        failed_at = [place for place, step in enumerate(sampled) if row in step.failed]
        expected = next((at for at in range(STEPS) if fails(FRAIL, state_of(tokens[:at]))), None)
        assert failed_at == ([] if expected is None else [expected])
        assert_obeyed(tokens[:expected])
    assert any(step.failed for step in sampled)
    assert not any(0 in step.failed for step in sampled)
    assert_obeyed(tokens_in(sampled, 0))


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
        def matcher(self, grammar: Grammar, output: Sequence[int]) -> Any:
            matcher = super().matcher(grammar, output)
            setattr(matcher, "compute_bitmask", lambda: 1 // 0)  # noqa: B010 — it is a method
            return matcher

    device = driver.device
    if isinstance(device, CudaDevice):
        device._sampling._masks._matchers = Broken()
    else:
        assert isinstance(device, TorchDevice)
        device._sampler._constraints = Constraints(Broken(), VOCAB_SIZE)
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
