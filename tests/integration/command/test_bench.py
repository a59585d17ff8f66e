"""The benchmark client against a real deployment: every scenario, small. Counts must be right, times are not judged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.benchmarks.client.report import Report, ScenarioResult
from tests.benchmarks.client.scenarios import SCENARIOS, SMALL
from tests.integration.deployments.deployment import LocalDeployment
from tests.tidy.source_files import ROOT
from tests.waiting import until


def segue_bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks.client", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def report(one_each: LocalDeployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """All scenarios, twice."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    flags = ("--url", f"{one_each.url}/v1", "--size", "small", "--runs", "2", "--json-file", str(file))
    ended = segue_bench(*flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(scenario.name in ended.stdout for scenario in SCENARIOS)
    yield msgspec.json.decode(file.read_bytes(), type=Report)
    until(lambda: not one_each.held(), 10, "everything given back, also by the streams that were left")


def row(report: Report, name: str) -> ScenarioResult:
    (found,) = [result for result in report.scenarios if result.name == name]
    return found


def test_every_scenario_has_as_many_runs_as_asked(report: Report) -> None:
    assert [result.name for result in report.scenarios] == [scenario.name for scenario in SCENARIOS]
    assert {len(result.runs) for result in report.scenarios} == {2}
    assert all(run.value > 0 for result in report.scenarios for run in result.runs)


def test_the_report_says_where_and_with_what_it_was_made(report: Report) -> None:
    assert report.model == "smollm2"
    assert report.machine.cpu
    assert report.machine.cores >= 1
    assert report.command.startswith("python -m tests.benchmarks.client --url")
    assert set(report.versions) == {"segue", "python", "aiohttp"}
    assert report.seed > 0


@pytest.mark.parametrize(
    ("name", "streams", "output_tokens"),
    [
        ("stream", 1, SMALL.output),
        ("streams8", SMALL.streams, SMALL.streams * SMALL.output),
        ("batch32", SMALL.batch, SMALL.batch * SMALL.output),
        ("prompt512", 1, SMALL.prompt_output),
        ("shared-prefix", SMALL.prefix_requests, SMALL.prefix_requests * SMALL.prefix_output),
        ("interference", 1 + SMALL.decoding, SMALL.arriving_output),
    ],
)
def test_all_streams_end_with_all_their_tokens(
    report: Report, name: str, streams: int, output_tokens: int
) -> None:
    runs = row(report, name).runs
    assert [(run.streams, run.output_tokens) for run in runs] == [(streams, output_tokens)] * 2


def test_mixed_lengths_are_the_same_in_every_run_and_within_bounds(report: Report) -> None:
    first, second = row(report, "mixed").runs
    assert first.streams == second.streams == SMALL.mixed_requests
    assert first.prompt_tokens == second.prompt_tokens
    assert first.output_tokens == second.output_tokens
    low, high = SMALL.mixed_output
    assert low * SMALL.mixed_requests <= first.output_tokens <= high * SMALL.mixed_requests


def test_the_server_counts_the_prompt_tokens_that_were_meant(report: Report) -> None:
    drawn = {result.name: [run.prompt_tokens_drawn for run in result.runs] for result in report.scenarios}
    counted = {result.name: [run.prompt_tokens for run in result.runs] for result in report.scenarios}
    assert counted == drawn
    assert counted["prompt512"] == [SMALL.prompt] * 2
    assert counted["interference"] == [SMALL.arriving_prompt] * 2


def test_only_the_shared_prefix_comes_from_a_cache(report: Report) -> None:
    cached = {result.name for result in report.scenarios if any(run.cached_tokens for run in result.runs)}
    assert cached <= {"shared-prefix"}


def test_one_seed_gives_the_same_prompts_and_so_a_full_cache(
    one_each: LocalDeployment, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    flags = ("--url", f"{one_each.url}/v1", "--size", "small", "--scenarios", "prompt512", "--seed", "7")
    for _ in range(2):
        assert segue_bench(*flags, "--json-file", str(file)).returncode == 0
    (again,) = row(msgspec.json.decode(file.read_bytes(), type=Report), "prompt512").runs
    assert again.cached_tokens >= SMALL.prompt // 2


def test_whatever_is_wrong_is_one_sentence(one_each: LocalDeployment) -> None:
    for flags, said in (
        (("--url", "http://127.0.0.1:9/v1"), "no server of OpenAI's API answers at http://127.0.0.1:9/v1"),
        (("--url", one_each.url), "the URL should end with /v1"),
        (("--url", f"{one_each.url}/v1", "--model", "gpt"), "does not serve gpt; it has: smollm2"),
        (("--scenarios", "speed"), "there is no scenario speed"),
    ):
        ended = segue_bench(*flags)
        assert ended.returncode == 1
        assert said in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
