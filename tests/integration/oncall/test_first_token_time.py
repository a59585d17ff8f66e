"""The first token is as late by the metric as it is for the client."""

from __future__ import annotations

import time
from statistics import median

import httpx2
import pytest

from tests.integration.deployments.deployment import LocalDeployment

PROMPT_TOKENS = 4000
SHARE, SECONDS = 0.05, 0.005  # what the two may differ by: the larger of both
TIMES = 7


def text_of(running: LocalDeployment, http: httpx2.Client, tokens: int) -> str:
    """A text of so many tokens, within a few."""
    words = [f"harbour{number}" for number in range(tokens)]
    counted = http.post(f"{running.url}/tokenize", json={"prompt": " ".join(words[:1000])}).json()["count"]
    return " ".join(words[: int(tokens / counted * 1000)])


def first_token_seconds(running: LocalDeployment, http: httpx2.Client, prompt: str) -> tuple[float, float]:
    """Seconds until the first piece of text as the client sees it, and by the router's metric."""
    (router,) = running.processes("router")
    before = running.metrics(router)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "stream": True}
    began = time.perf_counter()
    with http.stream("POST", f"{running.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        seconds = time.perf_counter() - began
        assert stream.status_code == 200
        for _ in lines:
            pass
    after = running.metrics(router)
    assert after["segue_ttft_seconds_count"] - before["segue_ttft_seconds_count"] == 1
    return seconds, after["segue_ttft_seconds_sum"] - before["segue_ttft_seconds_sum"]


@pytest.mark.timeout(600)
def test_a_long_prompts_first_token_is_as_late_by_the_metric_as_for_its_client(
    one_each: LocalDeployment,
) -> None:
    with httpx2.Client(timeout=180, verify=False) as http:
        prompt = text_of(one_each, http, PROMPT_TOKENS)
        count = http.post(f"{one_each.url}/tokenize", json={"prompt": prompt}).json()["count"]
        assert abs(count - PROMPT_TOKENS) < 400
        measured = [first_token_seconds(one_each, http, prompt) for _ in range(TIMES)]
    seen, metric = measured[0]
    assert abs(seen - metric) <= max(SHARE * seen, SECONDS), "computed"
    cached = measured[1:]  # where the tokenizer is much of it
    assert median(seen for seen, _ in cached) < measured[0][0]
    # A busy machine wakes a client late, never early: so what is the metric's own is in all of them
    off = [abs(seen - metric) / max(SHARE * seen, SECONDS) for seen, metric in cached]
    assert min(off) <= 1.0, measured
