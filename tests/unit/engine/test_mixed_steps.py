"""Rows of MIXED steps get what each gets alone: tokens, reports and scores, and on a CPU every bit of their logits.

A schedule is drawn from a seed: prompts whole or in chunks beside rows of other requests that decode, in any order,
with penalties, filters, seeds, grammars, masks, logprobs and scored prompts; some rows have no time for their masks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.engine.cpu.torch_device import TorchDevice
from shared.engine.cuda.device import CudaDevice
from shared.engine.sampling.masks import Constraints, MaskBudget
from shared.primitives.errors import InvariantError
from shared.wire.sampled import Sampled, TokenLogprobs
from tests.unit.engine.driver import Driver
from tests.unit.engine.late_requests import (
    LateModel,
    ReluctantBudget,
    ToyMatchers,
    Wanted,
    assert_alike,
)
from tests.unit.engine.tiny_models import VOCAB_SIZE

SLOTS = 6
PAGES_PER_SLOT = 3  # of 16 tokens: what the longest request needs
SEEDS = 12


@dataclass
class Served:
    """A request in a slot, and what it has got."""

    wanted: Wanted
    slot: int
    kv_len: int = 0
    tokens: list[int] = field(default_factory=list)
    told: list[TokenLogprobs] = field(default_factory=list)
    scored: list[TokenLogprobs] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def in_prompt(self) -> bool:
        return self.kv_len < len(self.wanted.prompt)

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.wanted.tokens)


class MixedBench:
    """A device, and steps that are launched and waited for one by one."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.seen: Counter[str] = Counter()

    def limit_masks(self, budget: MaskBudget) -> None:
        """Use these grammars, and this much time for them."""
        device = self.driver.device
        if isinstance(device, CudaDevice):
            device._sampling._masks._matchers = ToyMatchers()
            device._sampling._masks._budget = budget
        else:
            assert isinstance(device, TorchDevice)
            device._sampler._constraints = Constraints(ToyMatchers(), VOCAB_SIZE, budget)

    def alone(self, wanted: Wanted) -> Served:
        """The request by itself: its prompt at once, then a step a token."""
        served = Served(wanted, 0)
        self.step([], [(served, len(wanted.prompt))])
        while not served.done:
            self.step([served], [])
        return served

    def step(self, decoding: Sequence[Served], extending: Sequence[tuple[Served, int]]) -> None:
        """A token for each that decodes, and so many tokens of each prompt."""
        joins = [self._join(served) for served, _ in extending if not served.kv_len]
        rows = [self._row(served, size) for served, size in extending]
        mode = ForwardMode.MIXED if decoding and rows else ForwardMode.EXTEND if rows else ForwardMode.DECODE
        self.driver.step += 1
        slots = tuple(served.slot for served in decoding)
        device, number = self.driver.device, self.driver.step
        device.launch(ScheduleBatch(number, mode, tuple(joins), extend=tuple(rows), decode_slots=slots))
        self._take(device.wait(number), decoding, [served for served, _ in extending], rows)
        if mode is ForwardMode.MIXED:
            self.seen.update(
                mixed=1, scored=any(row.scores for row in rows), ended=any(row.samples for row in rows)
            )

    def _take(
        self,
        sampled: Sampled,
        decoding: Sequence[Served],
        extending: Sequence[Served],
        rows: Sequence[ExtendRow],
    ) -> None:
        for place, (served, row) in enumerate(zip(extending, rows, strict=True)):
            served.kv_len += len(row.token_ids)
            served.scored += sampled.scored.get(place, ())
        sampling = [*decoding, *(one for one, row in zip(extending, rows, strict=True) if row.samples)]
        assert not sampled.failed
        assert all(place < len(decoding) for place in sampled.sat_out)
        for place, (served, token_id) in enumerate(zip(sampling, sampled.token_ids, strict=True)):
            logits = self.driver.logits[served.slot].pop()
            if place in sampled.sat_out:
                self.seen["sat out beside prompts"] += bool(rows)
                continue
            served.kv_len += place < len(decoding)
            served.tokens.append(token_id)
            served.logits.append(logits)
            served.told += [sampled.logprobs[place]] if place in sampled.logprobs else []

    def _join(self, served: Served) -> SlotJoin:
        wanted, first = served.wanted, PAGES_PER_SLOT * served.slot
        pages = range(first, first + PAGES_PER_SLOT)
        known = wanted.prompt if wanted.params.needs_history else ()
        return self.driver.join(
            served.slot, pages, prompt_len=len(wanted.prompt), params=wanted.params, token_ids=known
        )

    def _row(self, served: Served, size: int) -> ExtendRow:
        wanted, start = served.wanted, served.kv_len
        part = wanted.prompt[start : start + size]
        samples = start + len(part) == len(wanted.prompt)
        return ExtendRow(served.slot, part, start, samples, wanted.scores(start, len(part)))

    def serve(self, drawn: random.Random, requests: Sequence[Wanted]) -> list[Served]:
        """All of them, in drawn steps; in the order of `requests`."""
        waiting, free, present, all_served = (
            list(requests),
            list(range(SLOTS)),
            list[Served](),
            list[Served](),
        )
        while waiting or present:
            while waiting and free and drawn.random() < 0.7:
                served = Served(waiting.pop(0), free.pop(drawn.randrange(len(free))))
                present.append(served)
                all_served.append(served)
            prompts = [one for one in present if one.in_prompt]
            ready = [one for one in present if not one.in_prompt]
            extending = [
                (one, drawn.choice((len(one.wanted.prompt), drawn.randint(1, 9))))
                for one in drawn.sample(prompts, drawn.randint(0, len(prompts)))
            ]
            decoding = drawn.sample(ready, drawn.randint(0, len(ready)))
            if extending or decoding:
                self.step(decoding, extending)
            for one in [one for one in present if one.done]:
                present.remove(one)
                free.append(one.slot)
        return all_served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LateModel:
    return LateModel(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["cpu-auto", "cpu-plain", "cpu-torch", "cuda-on-cpu"])
def bench(model: LateModel, request: pytest.FixtureRequest) -> Iterator[MixedBench]:
    device, _, kernels = (
        request.param.partition("-") if "cpu-" in request.param else (request.param, "", "torch")
    )
    settings = {"device": device, "kernels": kernels}
    driver = Driver(model.folder, pages=PAGES_PER_SLOT * SLOTS, slots=SLOTS, **settings)
    yield MixedBench(driver)
    driver.close()


def test_each_row_gets_what_it_gets_alone(bench: MixedBench, model: LateModel) -> None:
    bench.limit_masks(MaskBudget(lambda: 0.0))
    alone = [bench.alone(wanted) for wanted in model.requests]
    exact = isinstance(bench.driver.device, TorchDevice)
    for seed in range(SEEDS):
        drawn = random.Random(seed)
        bench.limit_masks(ReluctantBudget(drawn, drawn.choice((0.0, 0.3))))
        chosen = [drawn.randrange(len(alone)) for _ in range(12)]
        for own, at in zip(bench.serve(drawn, [model.requests[at] for at in chosen]), chosen, strict=True):
            expected = alone[at]
            assert own.tokens == expected.tokens
            if exact:
                assert (own.told, own.scored) == (expected.told, expected.scored)
                assert all(
                    torch.equal(one, other) for one, other in zip(own.logits, expected.logits, strict=True)
                )
            else:
                assert_alike(own.told, expected.told)
                assert_alike(own.scored, expected.scored)
    assert min(bench.seen[what] for what in ("mixed", "scored", "ended", "sat out beside prompts")) > SEEDS


def test_two_rows_of_a_slot_are_an_error_of_their_step(bench: MixedBench, model: LateModel) -> None:
    served = bench.alone(next(wanted for wanted in model.requests if wanted.params.grammar is None))
    row = ExtendRow(0, (5,), served.kv_len, samples=True)
    bench.driver.step += 1
    bench.driver.device.launch(
        ScheduleBatch(bench.driver.step, ForwardMode.MIXED, extend=(row,), decode_slots=(0,))
    )
    with pytest.raises(InvariantError, match="two rows of a slot"):
        bench.driver.device.wait(bench.driver.step)
