"""`helm install` serves, KV really moves between pods, and `kubectl scale` is all there is to scaling."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import httpx2
import pytest

from tests.cluster.conftest import LATER
from tests.cluster.load import Plan, run_streams
from tests.cluster.release import NAME, PORTS, Release
from tests.waiting import until


def test_an_installed_release_serves_and_its_own_test_passes(
    release: Release, undisturbed: dict[str, str]
) -> None:
    assert all(len(text) > 100 for text in undisturbed.values())
    fetched_bytes = release.total("decode", "segue_kv_fetched_bytes_total")
    found = release.cluster.helm("test", NAME, "--logs")
    assert release.total("decode", "segue_kv_fetched_bytes_total") > fetched_bytes
    assert re.search(r"\d+ bytes of KV moved for it in .* MB/s", found), found


def test_the_commands_that_an_installation_prints_lead_to_an_answer(release: Release) -> None:
    if release.cluster.context:
        pytest.skip("the printed commands are for the current context")
    notes = release.cluster.helm("get", "notes", NAME)
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")][:3]
    assert [command.split()[0] for command in commands] == ["kubectl", "kubectl", "curl"]
    script = "\n".join(["trap 'kill $(jobs -p)' EXIT", *commands])
    done = subprocess.run(
        ["bash", "-c", script], env=release.cluster.environment, capture_output=True, text=True, timeout=120
    )
    assert "data: [DONE]" in done.stdout, done.stderr


def test_every_router_tells_of_a_request_that_one_of_them_served(release: Release) -> None:
    release.scale("router", 2)
    release.wait_for("router", 2)
    body = {"model": "smollm2", "prompt": "One", "max_tokens": 2}
    rid = httpx2.post(f"{release.url}/v1/completions", json=body, timeout=30).headers["x-request-id"]
    routers = release.cluster.pods("router")
    told = [release.cluster.page(pod, PORTS["router"], f"/debug/requests/{rid}") for pod in routers]
    assert len(told) == 2
    assert told[0] == told[1]
    for component in ("prefill", "decode"):
        assert f'"{release.cluster.pods(component)[0].name}/' in told[0]
    release.scale("router", 1)
    release.wait_for("router", 1)


def test_a_new_decode_pod_gets_traffic_within_two_seconds_of_its_readiness(release: Release) -> None:
    old = release.cluster.pods("decode")[0].name
    release.scale("decode", 2)
    release.wait_for("decode", 2)
    ready_at = monotonic()
    new = next(pod for pod in release.cluster.pods("decode") if pod.name != old)

    def served() -> bool:
        httpx2.post(
            f"{release.url}/v1/completions",
            json={"model": "smollm2", "prompt": "One", "max_tokens": 2},
            timeout=30,
        ).raise_for_status()
        return release.metrics(new).get("segue_joins_total", 0) > 0

    until(served, 30, "a request on the new pod")
    assert monotonic() - ready_at < 2 + 1  # a second of this machine's kubectl
    release.scale("decode", 1)
    release.wait_for("decode", 1)


def test_with_no_decode_pod_requests_are_held_until_one_is_back(release: Release) -> None:
    release.scale("decode", 0)
    until(lambda: not release.cluster.pods("decode"), 60, "the end of all decode pods")
    plans = [Plan(plan.prompt, 8) for plan in LATER]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_streams, release.url, plans, "held")
        until(
            lambda: release.total("router", "segue_requests_running{state=waiting}") >= 4, 30, "held requests"
        )
        release.scale("decode", 1)
        report = waiting.result(120)
    assert [stream.ends for stream in report.streams] == [["length"]] * 4
    release.wait_for("decode", 1)
