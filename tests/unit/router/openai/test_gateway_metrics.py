"""The metrics at the API's port, as an inference gateway's endpoint picker and tools that know vLLM read them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.process.api_keys import key_line, new_key
from tests.monitoring.rendered import program
from tests.unit.router.raw_http import connect, post
from tests.unit.router.scripted_workers import LIMITS, LOAD, RunningRouter, Script
from tests.waiting import until

OF_SEGUE = ("segue_queued_requests", "segue_running_requests", "segue_kv_used_ratio")
OF_VLLM = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


def scraped(router: RunningRouter, names: tuple[str, ...]) -> list[float]:
    """The three gauges as a picker reads them: the one series of each family."""
    answer = router.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name in names:
        assert families[name].type == "gauge"
    return [sample.value for name in names for sample in families[name].samples]


@contextmanager
def open_requests(router: RunningRouter, count: int) -> Iterator[list[str]]:
    """Requests that have come and are not answered, by their ids; their clients hang up in the end."""
    body = json.dumps({"model": "tiny", "prompt": "Go", "max_tokens": 50, "stream": True}).encode()
    with ExitStack() as clients:
        for _ in range(count):
            clients.enter_context(connect(router)).sendall(post("/v1/completions", body))
        until(lambda: len(router.core._requests.live) == count, 10, "all requests")
        yield list(router.core._requests.live)


def states_in_debug(router: RunningRouter, ids: list[str]) -> Counter[str]:
    return Counter(router.http.get(f"{router.admin_url}/debug/requests/{rid}").json()["state"] for rid in ids)


def test_running_requests_and_used_kv_are_those_of_debug_and_of_the_workers(model_folder: Path) -> None:
    with RunningRouter(model_folder, metrics_on_api_port=True) as router:
        assert scraped(router, OF_SEGUE) == [0, 0, 0]
        router.workers.script = Script(stalled=True)
        with open_requests(router, 3) as ids:
            until(lambda: states_in_debug(router, ids) == {"decoding": 3}, 10, "decode")
            load = msgspec.structs.replace(LOAD, free_pages=LIMITS.pages // 4)
            router.call(lambda: router.workers.decode.send(router.workers.router.name, load))
            until(lambda: scraped(router, OF_SEGUE) == [0, 3, 0.75], 10, "the worker's load")


def test_requests_that_wait_for_a_worker_are_queued(model_folder: Path) -> None:
    """The prefill worker takes one request at a time, and says nothing of it."""
    settings: dict[str, Any] = {"prefilling_per_slot": 1 / LIMITS.slots, "local_prefill": "never"}
    with RunningRouter(model_folder, metrics_on_api_port=True, **settings) as router:
        router.workers.script = Script(silent=True)
        with open_requests(router, 3) as ids:
            until(lambda: states_in_debug(router, ids) == {"waiting": 2, "prefilling": 1}, 10, "prefill")
            assert scraped(router, OF_SEGUE) == [2, 1, 0]


def test_series_have_no_labels(model_folder: Path) -> None:
    with RunningRouter(model_folder, metrics_on_api_port=True) as router:
        text = router.http.get("/metrics").text
        assert [line for line in text.splitlines() if "{" in line] == []
        assert "vllm" not in text


@pytest.mark.parametrize(("names", "segue"), [("vllm", False), ("both", True)])
def test_vllms_names_tell_the_same(model_folder: Path, names: str, segue: bool) -> None:
    with RunningRouter(model_folder, metrics_on_api_port=True, metric_names=names) as router:
        tokens = router.says("Hello there")
        answer = router.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 20})
        assert answer.status_code == 200, answer.text
        router.http.get(f"{router.admin_url}/metrics")  # publishes what was measured
        families = {
            each.name: each for each in text_string_to_metric_families(router.http.get("/metrics").text)
        }
        assert set(OF_VLLM) <= set(families)
        assert (OF_SEGUE[0] in families) == segue
        for family, count in (
            ("time_to_first_token", 1),
            ("inter_token_latency", tokens - 1),
            ("e2e_request_latency", 1),
        ):
            samples = families[f"vllm:{family}_seconds"].samples
            (counted,) = (sample.value for sample in samples if sample.name.endswith("_count"))
            assert counted == count, family
            assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
        (config,) = families["vllm:cache_config_info"].samples
        assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("16", str(LIMITS.pages))


def test_the_parser_of_pickers_reads_the_page_and_that_of_the_admin_port(model_folder: Path) -> None:
    """promtool parses as endpoint pickers do, with Prometheus' own parser in Go; what its linter says is not judged."""
    with RunningRouter(model_folder, metrics_on_api_port=True, metric_names="both") as router:
        router.says("Hello there")
        pages = [router.http.get(f"{url}/metrics").content for url in (router.url, router.admin_url)]
    for page in (*pages, b"segue_ready 1 1 1\n"):
        command = [program("promtool"), "check", "metrics"]
        ended = subprocess.run(command, input=page, capture_output=True, check=False)
        assert (b"parsing error" in ended.stderr) == (page not in pages), ended.stderr


def test_however_often_it_is_asked_for_it_is_written_every_now_and_then(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway_metrics.KEPT_SECONDS", 3600.0)
    with RunningRouter(model_folder, metrics_on_api_port=True) as router:
        assert scraped(router, OF_SEGUE) == [0, 0, 0]
        router.workers.script = Script(stalled=True)
        with open_requests(router, 3) as ids:
            until(lambda: states_in_debug(router, ids) == {"decoding": 3}, 10, "decode")
            assert scraped(router, OF_SEGUE) == [0, 0, 0]


def test_it_is_off_by_default(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        assert router.http.get("/metrics").status_code == 404


def test_it_needs_no_key_and_names_none(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{key_line('shop', new_key())}\n")
    settings: dict[str, Any] = {
        "metrics_on_api_port": True,
        "metric_names": "both",
        "api_keys_file": str(file),
    }
    with RunningRouter(model_folder, **settings) as router:
        answer = router.http.get("/metrics")
        assert (answer.status_code, "shop" in answer.text) == (200, False)
        assert router.http.get("/v1/models").status_code == 401
        assert router.http.post("/metrics", json={}).status_code == 401
        assert json.loads(router.http.get("/").text)["name"] == "segue"
