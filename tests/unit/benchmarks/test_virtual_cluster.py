"""The virtual cluster: what its device and its fabric model, that a seed decides a run, and gates on small runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from decode.config import DecodeConfig
from shared.batch.schedule_batch import ExtendRow, ForwardMode, ScheduleBatch, SlotJoin
from shared.transfer.protocol import FetchEnded, FetchEvent, FetchFailed, FetchLanded, FetchStale
from shared.wire.baton import Baton, Holder
from shared.wire.sampling_params import SamplingParams
from tests.benchmarks.virtual_cluster.__main__ import SCENARIOS
from tests.benchmarks.virtual_cluster.balance_scenarios import OF_RETRACTED
from tests.benchmarks.virtual_cluster.cluster import ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.device import EOS_TOKEN_ID, StepTimes, VirtualDevice, output_seed
from tests.benchmarks.virtual_cluster.fabric import FabricSpeed, VirtualFabric, VirtualFetcher
from tests.benchmarks.virtual_cluster.figures import Figures, GapHistogram
from tests.benchmarks.virtual_cluster.scenario import ScenarioSize, number, run_scenario
from tests.benchmarks.virtual_cluster.trace import DrawTrace
from tests.simulation.world.fabric import FabricWords
from tests.simulation.world.timeline import Timeline, TimelineProcess

TIMES = StepTimes(extend=1.0, extend_token=0.1, decode=2.0, decode_row=0.5, copied_page=0.25)
TINY = ScenarioSize(fleet=0.01, length=0.1)


def idle() -> None:
    """Nobody is to be woken."""


def join(slot: int, prompt_len: int, output_len: int, kv_len: int = 0) -> SlotJoin:
    params = SamplingParams(max_new_tokens=100, seed=output_seed(7, output_len))
    return SlotJoin(slot, (), kv_len, params, prompt_len)


def test_steps_take_their_modelled_time_one_after_the_other() -> None:
    device = VirtualDevice(process=TimelineProcess(Timeline(), "p"), times=TIMES, on_copied=idle)
    rows = (ExtendRow(0, (1,) * 4, 0, True), ExtendRow(1, (1,) * 6, 0, False))
    joins = (join(0, 4, 9), join(1, 12, 9))
    device.launch(ScheduleBatch(1, ForwardMode.EXTEND, joins, extend=rows))
    device.launch(ScheduleBatch(2, ForwardMode.DECODE, decode_slots=(0, 1)))
    assert device.completes_at(1) == pytest.approx(1.0 + 10 * 0.1)
    assert device.completes_at(2) == pytest.approx(2.0 + 2.0 + 2 * 0.5)
    assert len(device.wait(1).token_ids) == 1  # the middle chunk samples nothing
    assert device.completed() == 1


def test_an_output_ends_where_its_seed_says_on_any_device() -> None:
    device = VirtualDevice(process=TimelineProcess(Timeline(), "p"), times=TIMES, on_copied=idle)
    device.launch(
        ScheduleBatch(1, ForwardMode.EXTEND, (join(0, 4, 3),), extend=(ExtendRow(0, (1,) * 4, 0, True),))
    )
    device.launch(ScheduleBatch(2, ForwardMode.DECODE, (join(5, 4, 3, kv_len=4),), decode_slots=(5,)))
    device.launch(ScheduleBatch(3, ForwardMode.DECODE, decode_slots=(5,)))
    tokens = [token for step in (1, 2, 3) for token in device.wait(step).token_ids]
    assert [token == EOS_TOKEN_ID for token in tokens] == [False, False, True]


@dataclass
class FetchBench:
    """Two workers' memories, one of which reads from the other."""

    def __post_init__(self) -> None:
        self.timeline = Timeline()
        self.fabric = VirtualFabric(FabricSpeed(latency_seconds=0.5, bytes_per_second=1000.0))
        self.holder, self.reader = self._fetcher("holder"), self._fetcher("reader")
        self.holder.words.write(0, 77, ())

    def _fetcher(self, uid: str) -> VirtualFetcher:
        process = TimelineProcess(self.timeline, uid)
        words = FabricWords(process, 1, count(1).__next__)
        fetcher = VirtualFetcher(self.fabric, process, Holder(uid, 1, uid, b"", 0, 500, 0), words, idle)
        self.fabric.fetchers[uid] = fetcher
        return fetcher

    def fetch(self, fetch_id: int, pages: int) -> None:
        baton = Baton("r", 1, self.holder.holder, "kv", 0, 77, 64, 64, tuple(range(pages)))
        self.reader.start(fetch_id, baton, 0, range(pages))


def test_fetches_take_their_bytes_by_the_rate_one_after_the_other() -> None:
    bench = FetchBench()
    bench.fetch(1, 4)
    bench.fetch(2, 2)
    landed: dict[int, float] = {}
    while bench.timeline.advance():
        landed |= {event.fetch_id: bench.timeline.now for event in bench.reader.poll()}
    assert landed == pytest.approx({1: 2.5, 2: 3.5})


def test_a_read_of_an_ended_lease_is_stale_and_one_of_a_dead_holder_fails() -> None:
    bench = FetchBench()
    bench.holder.words.clear(0)
    bench.fetch(1, 1)
    bench.timeline.advance()
    assert bench.reader.poll() == [FetchStale(1)]
    bench.fetch(2, 1)
    bench.holder.process.kill()
    bench.timeline.advance()
    assert [type(event) for event in bench.reader.poll()] == [FetchFailed]


def test_an_abandoned_fetch_ends_and_reports_nothing_else() -> None:
    bench = FetchBench()
    bench.fetch(1, 1)
    bench.reader.abandon(1)
    bench.timeline.advance()
    assert bench.reader.poll() == [FetchEnded(1)]


@pytest.mark.parametrize(("polls_first", "told"), [(False, [FetchEnded(1)]), (True, [])])
def test_a_fetch_ends_once_also_if_it_is_abandoned_when_it_has_landed(
    polls_first: bool, told: list[FetchEvent]
) -> None:
    bench = FetchBench()
    bench.fetch(1, 1)
    while bench.timeline.advance():
        pass
    if polls_first:
        assert [type(event) for event in bench.reader.poll()] == [FetchLanded]
    bench.reader.abandon(1)
    assert bench.reader.poll() == told


def test_a_quantile_of_gaps_is_right_within_two_per_cent() -> None:
    gaps = GapHistogram()
    for milliseconds in range(1, 101):
        gaps.add(milliseconds / 1000)
    for share in (0.5, 0.99):
        assert gaps.quantile(share) == pytest.approx(share / 10, rel=0.021)
    assert GapHistogram().quantile(0.5) is None


def figures_of(scenario: str, seed: int, *, encodes: bool = False) -> Figures:
    shape = next(iter(SCENARIOS[scenario].runs(ScenarioSize(fleet=0.01, length=0.03)).values()))
    cluster = VirtualCluster(shape, seed, encodes=encodes)
    cluster.run()
    return cluster.figures()


def test_a_seed_decides_a_run_and_the_wire_format_changes_nothing() -> None:
    once, again, encoded = (figures_of("fleet", 1, encodes=encodes) for encodes in (False, False, True))
    assert once == again == encoded
    assert figures_of("fleet", 2)["digest"] != once["digest"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a small run of a scenario must show, as ratios: no times of this machine."""

    scenario: str
    size: ScenarioSize = TINY
    at_least: tuple[tuple[str, float], ...] = ()
    at_most: tuple[tuple[str, float], ...] = ()
    occurred: tuple[tuple[str, ...], ...] = ()  # figures by run and key that must not be zero
    long: bool = False  # a dozen seconds of a core and more


GATES = (
    Gate(
        scenario="fleet_deaths",
        at_least=(("deaths: completed_share", 1.0),),
        at_most=(("deaths: broken_share", 0.0),),
        occurred=(
            ("deaths", "events", "prefill died"),
            ("deaths", "events", "decode died"),
            ("deaths", "continuations", "lost_decode"),
        ),
    ),
    Gate(
        scenario="fleet_upgrade",
        at_least=(("upgrade: completed_share", 1.0),),
        at_most=(("upgrade: broken_share", 0.0),),
        occurred=(
            ("upgrade", "events", "prefill upgraded"),
            ("upgrade", "events", "decode upgraded"),
            ("upgrade", "events", "router upgraded"),
            ("upgrade", "migrations", "migrated drain"),
        ),
    ),
    Gate(
        scenario="fleet",
        size=ScenarioSize(fleet=0.01, length=0.2),
        at_least=(
            ("fleet: goodput_tokens_per_second_by_one", 0.97),
            ("fleet, 4 routers: goodput_tokens_per_second_by_one", 0.97),
        ),
        at_most=(("fleet: ttft_p50_by_one", 1.5), ("fleet, 4 routers: ttft_p50_by_one", 1.5)),
    ),
    Gate(
        scenario="no_max_tokens",
        size=ScenarioSize(),
        at_most=(
            ("second_token_gap_p99", 0.4),
            ("by_that_with_max_tokens", 1.2),
            ("broken_share", 0.0),
        ),
        occurred=(("half", "without", "requests"), ("half", "with", "requests")),
    ),
    Gate(
        scenario="long_prompts",
        size=ScenarioSize(),
        at_most=(("ttft_p50", 4.5), ("second_token_gap_p99", 3.0), ("broken_share", 0.0)),
    ),
    Gate(
        scenario="slow_link",
        size=ScenarioSize(length=0.25),
        at_least=(("4,000 at 112 %: goodput_share_of_link", 0.95),),
        at_most=(
            ("4,000 at 112 %: second_token_gap_p50", 1.5),
            ("4,000 at 112 %: second_token_gap_p99", 3.0),
            ("4,000 at 112 %, 4 routers: second_token_gap_p50", 1.5),
            ("4,000 at 112 %, 4 routers: second_token_gap_p99", 3.0),
            ("4,000 at 112 %: no_room_refusals_a_request", 0.05),
            ("4,000 at 112 %, 4 routers: no_room_refusals_a_request", 0.05),
        ),
    ),
    Gate(
        scenario="targets",
        size=ScenarioSize(length=0.4),
        at_least=(("2 s: within_target_per_second", 12.0), ("2 s: goodput_share_of_capacity", 0.97)),
        at_most=(("none: foreseen_error_p50", 0.2), ("2 s: foreseen_error_p50", 0.25)),
        occurred=(("2 s", "targets", "met"), ("2 s", "targets", "refused")),
    ),
    Gate(
        scenario="flood",
        size=ScenarioSize(),
        at_least=(("flood: goodput_share_of_capacity", 0.95),),
        at_most=(
            ("flood: answers_503_a_request", 0.0),
            ("flood: foreseen_error_p50", 0.2),
            ("flood: no_room_refusals_a_request", 0.2),
            ("flood: others_ttft_p99", 0.5),
        ),
        occurred=(("flood", "outcomes", "429"), ("flood", "others", "requests")),
    ),
    Gate(
        scenario="small_pools",
        at_least=(("prompts: goodput_requests_per_second", 3.38),),
        at_most=(
            ("prompts, 2 routers: no_room_refusals_a_request", 0.06),
            ("prompts, 4 routers: no_room_refusals_a_request", 0.09),
            ("prompts: second_token_gap_p99", 3.0),
            ("prompts, 2 routers: second_token_gap_p99", 3.0),
            ("prompts, 4 routers: second_token_gap_p99", 3.0),
            ("prompts: long_pause_share", 0.02),
            ("prompts, 2 routers: long_pause_share", 0.02),
            ("prompts, 4 routers: long_pause_share", 0.02),
            ("prompts: no_room_refusals_a_request", 0.2),
        ),
        size=ScenarioSize(length=0.5),
    ),
    Gate(
        scenario="outgrown_pool",
        size=ScenarioSize(),
        at_most=(
            ("pause_max", 10.0),
            ("pause_max_recomputed", 25.0),
            ("seconds_by_those_copied", 1.4),
            ("broken_share", 0.0),
        ),
        occurred=(
            ("outgrown", "retractions"),
            ("outgrown", "chat", "outcomes", "stop"),
            ("recomputed", "recomputed"),
        ),
    ),
    Gate(
        scenario="both_roles",
        size=ScenarioSize(length=0.5),
        at_least=(("goodput_tokens_per_second_by_that_of_1_1", 1.0),),
        at_most=(
            ("ttft_p50_by_that_of_1_1", 0.8),
            ("ttft_p99_by_that_of_1_1", 0.8),
            ("itl_p99", 0.05),
            ("short_ttft_p99_by_the_better", 1.0),
        ),
        occurred=(("0 + 2", "local_prompts"), ("short", "local_prompts")),
    ),
    Gate(
        scenario="overload_2",
        size=ScenarioSize(length=0.5),
        at_least=(("goodput_share_of_capacity", 0.97),),
        at_most=(("second_token_gap_p99", 4.0), ("broken_share", 0.0)),
        occurred=(("overload", "outcomes", "429"),),
    ),
    Gate(
        scenario="affinity",
        size=ScenarioSize(length=0.5),
        at_least=(
            ("prefix_hit_share_of_1", 0.75),
            ("prefix_hit_share_of_2", 0.74),
            ("prefix_hit_share_of_4", 0.72),
            ("by_that_of_round_robin", 1.35),
        ),
        at_most=(("ttft_p50", 0.1),),
    ),
    Gate(
        scenario="shared_prefixes",
        long=True,
        size=ScenarioSize(length=0.5),
        at_least=(
            ("prefix_hit_share_of_1", 0.8),
            ("prefix_hit_share_of_2", 0.8),
            ("prefix_hit_share_of_4", 0.8),
            *((f"short_prefix_hit_share_of_{routers}", 0.8) for routers in (1, 2, 4)),
            *((f"aggregated_prefix_hit_share_of_{routers}", 0.75) for routers in (1, 2, 4)),
        ),
        at_most=(("computed_most_by_least", 1.7), ("one_prefix_computed_most_by_mean", 1.32)),
        occurred=(
            ("forty, 4 routers", "placements", "prefill own"),
            ("forty, 4 routers", "placements", "prefill cached"),
            ("short, 4 routers", "local_prompts"),
            ("aggregated, 4 routers", "local_prompts"),
            ("one", "placements", "prefill spread"),
        ),
    ),
    Gate(
        scenario="conversations",
        long=True,
        size=ScenarioSize(length=0.5),
        at_most=(
            ("fetched_mb_a_request_of_1", 0.6),
            ("fetched_mb_a_request_of_2", 0.57),
            ("fetched_mb_a_request_of_4", 0.57),
            *((f"rows_most_by_least_of_{routers}", 1.15) for routers in (1, 2, 4)),
            *((f"ttft_p99_of_{routers}", 1.05) for routers in (1, 2, 4)),
            *((f"itl_p99_of_{routers}", 1.05) for routers in (1, 2, 4)),
            ("short_computed_tokens_a_request_by_that_of_turns", 0.95),
            ("short_fetched_mb_a_request_by_that_of_turns", 1.0),
            ("short_itl_p99_by_that_of_turns", 1.25),
        ),
        occurred=(("turns, 2 routers", "placements", "decode cached"), ("short", "local_prompts")),
    ),
    Gate(
        scenario="short_behind_long",
        size=ScenarioSize(),
        at_most=(("short_ttft_p90", 0.55), ("long_slowdown", 1.15)),
        occurred=(("together", "long", "requests"), ("together", "short", "requests")),
    ),
    Gate(
        scenario="balance",
        long=True,
        size=ScenarioSize(length=0.75),
        at_most=(
            (f"balanced: {OF_RETRACTED}", 0.05),
            (f"balanced, 2 routers: {OF_RETRACTED}", 0.05),
            (f"balanced, 4 routers: {OF_RETRACTED}", 0.05),
        ),
        at_least=((f"left: {OF_RETRACTED}", 0.1),),
        occurred=(("balanced", "migrations", "migrated balance"), ("left", "events", "retracted")),
    ),
    Gate(
        scenario="slow_pods",
        long=True,
        size=ScenarioSize(length=0.5),
        at_least=(("slow: computed_most_by_least", 2.5), ("slow: rows_most_by_least", 2.5)),
        at_most=(
            ("slow: computed_most_by_least", 5.0),
            ("slow: rows_most_by_least", 5.0),
            ("even: computed_most_by_least", 1.2),
            ("even: rows_most_by_least", 1.3),
            ("slow: ttft_p99", 0.8),
        ),
        occurred=(("slow", "local_prompts"), ("slow", "migrations", "migrated packed")),
    ),
    Gate(
        scenario="ageing",
        size=ScenarioSize(length=0.5),
        at_most=(("long_by_that_without", 0.4),),
        occurred=(("never", "long", "requests"), ("5 s", "short", "requests")),
    ),
    Gate(
        scenario="drain_at_saturation",
        long=True,
        size=ScenarioSize(length=0.5),
        at_least=(("migrated_share", 0.95),),
        occurred=(("drain", "migrations", "migrated drain"), ("drain", "events", "running_at_sigterm")),
    ),
    Gate(
        scenario="satout",
        size=ScenarioSize(length=0.5),
        at_most=(("rows_without_page", 0),),
        occurred=(("warm tree", "decode_rows"),),
    ),
    Gate(
        scenario="tight_pool",
        size=ScenarioSize(length=0.5),
        at_least=(("share_of_ample", 0.82),),
        at_most=(("no_room_refusals_a_request", 0.3),),
        occurred=(("tight", "retractions"),),
    ),
)


@pytest.mark.parametrize(
    "gate",
    [pytest.param(gate, id=gate.scenario, marks=[pytest.mark.long] if gate.long else []) for gate in GATES],
)
def test_small_runs_keep_to_their_gates(gate: Gate) -> None:
    result = run_scenario(SCENARIOS[gate.scenario], seed=0, size=gate.size)
    for key, bound in gate.at_least:
        assert number(result.compared, key) >= bound, (key, result.compared)
    for key, bound in gate.at_most:
        assert number(result.compared, key) <= bound, (key, result.compared)
    counts = {number(figures, "pods", "routers") for figures in result.figures.values()}
    several = any(number(each, "pods", "decode") > 1 for each in result.figures.values())
    assert counts >= {1, 2, 4} if several else counts == {1}
    assert not sum(number(figures, "broken_streams") for figures in result.figures.values())
    for run, *path in gate.occurred:
        assert number(result.figures[run], *path) > 0, (run, path)


def test_every_scenario_is_listed_with_what_it_is_about() -> None:
    assert all(scenario.about for scenario in SCENARIOS.values())
    assert {"no_max_tokens", "overload_2", "fleet", "fleet_upgrade"} <= SCENARIOS.keys()


# ---- the longest turn ----


@dataclass(frozen=True, slots=True)
class MeteredTimes(StepTimes):
    """Adds up, over all steps of a device, the seconds of prompts and of all that it does."""

    spent: dict[str, float] = field(default_factory=lambda: {"extend": 0.0, "all": 0.0})

    def of(self, batch: ScheduleBatch, context: int) -> float:
        seconds = StepTimes.of(self, batch, context)
        self.spent["all"] += seconds
        self.spent["extend"] += StepTimes.of(self, replace(batch, decode_slots=()), 0)
        return seconds


def test_where_the_bound_cuts_turns_short_pauses_and_what_is_computed_again_have_bounds() -> None:
    """Twelve chats of 3,000 tokens of which four fit, no host memory, and a device that takes 1.5 ms for a token."""
    decode, turn_seconds, chats, fit, target = DecodeConfig(), 20.0, 12, 4, 0.1
    times = MeteredTimes(extend=0.005, extend_token=0.0015, decode=0.017, decode_row=0.0002)
    shape = SCENARIOS["outgrown_pool"].runs(ScenarioSize())["recomputed"]
    shape = replace(
        shape, decode=replace(shape.decode, times=times, host_share=0.0), trace=chats_alone(shape)
    )
    cluster = VirtualCluster(shape, 0, encodes=False)
    cluster.run()
    figures = cluster.figures()
    assert number(figures, "outcomes", "stop") == chats
    assert 2 * fit * 3_000 * times.extend_token > turn_seconds, "the bound does not cut turns short"
    most = 1 - times.decode / target
    assert decode.itl_target_seconds == target
    assert 1 / 3 < times.spent["extend"] / times.spent["all"] < most
    computed = fit * 3_000 * times.extend_token / most
    assert number(figures, "pause_max") < (chats - fit) / fit * (turn_seconds + computed)


def chats_alone(shape: ClusterShape) -> DrawTrace:
    return lambda rng: (each for each in shape.trace(rng) if each.kind == "chat")
