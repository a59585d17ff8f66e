"""What a scenario is: a few runs of virtual clusters, and what their figures show beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.virtual_cluster.cluster import START_SECONDS, ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.figures import Figures, first_tokens, quantile, second_token_gaps

ROUTERS = (1, 2, 4)  # a scenario of several pods is run with as many, beside as many as it has itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSize:
    """1 is what docs/lab/load.md shows."""

    # pods of a fleet, and the requests that come in a second; a scenario of a few pods has no other
    fleet: float = 1.0
    length: float = 1.0  # seconds in which requests come


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadScenario:
    """Runs by name, for a size."""

    about: str
    runs: Callable[[ScenarioSize], Mapping[str, ClusterShape]]
    # the figures that the scenario is for
    compared: Callable[[Mapping[str, Figures]], Figures] = lambda _: {}


@dataclass(frozen=True, slots=True)
class RunCurves:
    """What a picture shows of a run: seconds at each hundredth of the requests, and the tokens of each second."""

    ttft: list[float]
    second_token_gap: list[float]
    tokens_by_second: list[int]


@dataclass(frozen=True, slots=True)
class VirtualResult:
    """The figures of each run, what they show together, and what the routers cost on this machine."""

    figures: Mapping[str, Figures]
    compared: Figures
    cost: Mapping[str, Figures]
    curves: Mapping[str, RunCurves]


def run_scenario(
    scenario: LoadScenario,
    *,
    seed: int,
    size: ScenarioSize,
    encodes: bool = False,
    routers: Sequence[int] = ROUTERS,
) -> VirtualResult:
    """Live through all runs of a scenario, those of several pods also with as many `routers`."""
    figures, cost, curves = {}, {}, {}
    for name, shape in _with_routers(scenario.runs(size), routers).items():
        cluster = VirtualCluster(shape, seed, encodes=encodes)
        cluster.run()
        figures[name], cost[name] = cluster.figures(), cluster.cost()
        curves[name] = _curves(cluster)
    return VirtualResult(figures, scenario.compared(figures), cost, curves)


def _with_routers(shapes: Mapping[str, ClusterShape], routers: Sequence[int]) -> Mapping[str, ClusterShape]:
    runs: dict[str, ClusterShape] = {}
    for name, shape in shapes.items():
        runs[name] = shape
        if max(shape.prefill_workers, shape.decode_workers) > 1:
            others = [count for count in routers if count != shape.routers]
            runs |= {
                f"{name}, {count} router{'s' * (count > 1)}": replace(shape, routers=count)
                for count in others
            }
    return runs


def _curves(cluster: VirtualCluster) -> RunCurves:
    by_second = cluster.recorder.tokens_by_second
    seconds = range(int(START_SECONDS), max(by_second, default=0) + 1)
    return RunCurves(
        _hundredths(first_tokens(cluster.records)),
        _hundredths(second_token_gaps(cluster.records)),
        [by_second[second] for second in seconds],
    )


def _hundredths(ascending: list[float]) -> list[float]:
    return [round(quantile(ascending, n / 100) or 0.0, 5) for n in range(101)] if ascending else []


def number(figures: Figures, *path: str) -> float:
    """A figure that must be there."""
    value: object = figures
    for key in path:
        assert isinstance(value, dict), path
        value = value.get(key, 0)
    assert isinstance(value, int | float), (path, value)
    return value


def broken_share(run: Figures) -> float:
    """The share of a run's requests whose stream ended in an error after its first token."""
    return round(number(run, "broken_streams") / number(run, "requests"), 5)
