"""Whatever the device does late, each request gets the tokens it got alone; and a mistake would be seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.cuda.late_bench import LateBench
from tests.unit.engine.cuda.late_mistakes import MISTAKES, seeds_until_caught
from tests.unit.engine.late_requests import FAMILY, LateModel
from tests.unit.engine.tiny_models import FAMILIES

SEEDS = 60
SEEDS_PER_FAMILY = 4
SEEDS_PER_MISTAKE = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LateModel:
    return LateModel(tmp_path_factory.mktemp("model"))


def test_tokens_are_those_of_each_request_alone(model: LateModel) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        bench = LateBench(model, seed)
        bench.run()
        seen.update(moves=bench.moves, retractions=bench.retractions, prefixes=bench.reused)
        seen.update(told=bench.told, scored=bench.scored, opened=bench.opened, sat_out=bench.sat_out)
        seen.update(mixed=bench.mixed)
        counters = bench.device.counters
        seen.update({f"graph of {rows}": steps for rows, steps in counters.graph_steps.items()})
        seen.update({f"prompts by {how}": steps for how, steps in counters.extend_graph_steps.items()})
    rare = {
        what: seen[what]
        for what in (
            "moves",
            "retractions",
            "prefixes",
            "told",
            "scored",
            "opened",
            "sat_out",
            "mixed",
            *map("graph of {}".format, (1, 2, 4, 5)),
            *map("prompts by {}".format, (16, 32, "eager")),
        )
    }
    assert min(rare.values()) > SEEDS / 5, rare


@pytest.mark.parametrize("guards", ["two", "one"])
def test_a_mixed_step_waits_for_nothing_of_its_own(model: LateModel, guards: str) -> None:
    bench = LateBench(model, 0)
    bench.run()
    device, stream, step = bench.device, bench.stream, bench.device._launched
    params, prompt = SamplingParams(max_new_tokens=9, seed=0, temperature=0.0), (5, 6, 7)
    if guards == "one":
        attention = device._parts.attention.attention  # type: ignore[attr-defined]
        for plan in (attention._extend_plan, attention._graph_plan):
            plan._guard = attention._decode_plan._guard
    for slot, mode, decode_slots in ((0, ForwardMode.EXTEND, ()), (1, ForwardMode.MIXED, (0,))):
        stream.synchronize()
        before, step = stream.done, step + 1
        join = SlotJoin(slot, (slot,), 0, params, len(prompt))
        row = ExtendRow(slot, prompt, 0, samples=True)
        device.launch(ScheduleBatch(step, mode, (join,), extend=(row,), decode_slots=decode_slots))
        if mode is ForwardMode.MIXED:
            assert (stream.done == before) is (guards == "two")
        device.wait(step)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != FAMILY])
@pytest.mark.long
def test_every_family_gets_them(family: str, tmp_path: Path) -> None:
    model = LateModel(tmp_path, family)
    for seed in range(SEEDS_PER_FAMILY):
        LateBench(model, seed).run()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(model: LateModel, mistake: str) -> None:
    assert (
        seeds_until_caught(mistake, lambda seed: LateBench(model, seed).run(), SEEDS_PER_MISTAKE) is not None
    )
