"""Prefill and decode workers of unequal ranks serve together: each rank reads its slices of the other's pages.

Over gloo on `cuda-on-cpu`, by real NIXL and real TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.integration.deployments.aggregated import needs_prefill
from tests.integration.deployments.deployment import LocalDeployment, deployment, free_port
from tests.integration.deployments.ranked import followers_of
from tests.integration.deployments.running import Running
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete, crowd
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.served_models import (
    GREEDY,
    TOKENS,
    WORKER,
    prompts_of,
    saved_as_clients_call_it,
    vocab_size,
)
from tests.link_keys import write_new_keys
from tests.metric_pages import samples_of
from tests.unit.engine.tiny_models import SIZES
from tests.waiting import until

pytestmark = needs_prefill("no pages are fetched")

STREAMS = 8
MEMORY_BYTES = 8 << 30  # that a worker may take: each rank sets 1 GiB apart for graphs, and uses little of it
MANY_TOKENS = (
    120  # of a stream: eight of them need three times the pages of `two_and_two`, and last some seconds
)
LONG: dict[str, Any] = GREEDY | {"max_tokens": 40}
HOST_CUDA = ["--device", "cuda-on-cpu", "--dtype", "float32", "--threads", "2", "--log-level", "info"]


def llama() -> PreTrainedModel:
    """Four ranks can share it: two of them have the same key-value head."""
    sizes = SIZES | {"hidden_size": 192, "intermediate_size": 272, "vocab_size": vocab_size()}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads, head_dim=32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, served = saved_as_clients_call_it(llama, tmp_path_factory.mktemp("model"))
    return served


def ranked(model: Path, prefill: int, decode: int, transport: str, **of_decode: int) -> Any:
    """A prefill and a decode worker of so many ranks, which compute no prompts at decode."""
    flags = ["--model", str(model), *HOST_CUDA, "--local-prefill", "fallback"]
    flags += ["--prefill-gpus", str(prefill), "--decode-gpus", str(decode), "--kv-transport", transport]
    worker = WORKER | {"memoryBytes": MEMORY_BYTES}
    return deployment(*flags, config={"prefill": worker, "decode": worker | of_decode})


def fetched_pages_alone(running: LocalDeployment) -> bool:
    """Whether decode has fetched, and computed no prompt itself."""
    local, fetched = (
        running.total("decode", f"segue_{name}_total") for name in ("local_prompts", "kv_fetched_bytes")
    )
    return fetched > 0 and local == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        pytest.param(2, 4, "tls", marks=pytest.mark.long),
        pytest.param(4, 2, "nixl", marks=pytest.mark.long),
        pytest.param(1, 2, "tls", marks=pytest.mark.long),
        (2, 1, "nixl"),
    ],
)
def test_greedy_answers_are_those_of_transformers(
    prefill: int, decode: int, transport: str, model: Path
) -> None:
    prompts = prompts_of(model)
    with ranked(model, prefill, decode, transport) as running:
        answers = crowd(running.url, prompts, 4, **GREEDY)
        assert_answers_of_transformers(model, prompts, answers, TOKENS)
        assert fetched_pages_alone(running)
        until(lambda: not running.held(), 10, "everything given back")


@pytest.fixture(scope="module")
def two_and_two(model: Path) -> Iterator[LocalDeployment]:
    """With so few pages at decode that streams are retracted to host pages and come back."""
    with ranked(model, 2, 2, "tls", kvPages=40, maxRunningRequests=STREAMS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(two_and_two: LocalDeployment, model: Path) -> list[StreamedAnswer]:
    answers = crowd(two_and_two.url, prompts_of(model)[:STREAMS], STREAMS, **LONG)
    assert fetched_pages_alone(two_and_two)
    return answers


# ---- what a request may ask for --------------------------------------------------------------------------------------

WORDS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ASKED: dict[str, dict[str, Any]] = {
    "a schema": {"extra_body": {"structured_outputs": {"json": WORDS}}, "max_tokens": 30},
    "a regular expression": {"extra_body": {"structured_outputs": {"regex": "[0-9]{3}-(yes|no)"}}},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "max_tokens": 20},
    "bias": {"logit_bias": {"11": 30, "12": -100}},
    "log probabilities": {"logprobs": 3},
    "a scored prompt": {"echo": True, "logprobs": 1},
    "a seed": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "siblings": {"temperature": 1.0, "seed": 8, "n": 3},
}


def asked_of(running: LocalDeployment, prompt: list[int]) -> dict[str, list[tuple[str, list[float]]]]:
    """The answers to each of these requests, one after the other: texts, and log probabilities."""
    found = {}
    for name, fields in ASKED.items():
        given = {"temperature": 0, "max_tokens": 8} | fields
        answer = running.client.completions.create(model="smollm2", prompt=prompt, **given)
        found[name] = [
            (
                choice.text,
                [each or 0.0 for each in (choice.logprobs and choice.logprobs.token_logprobs) or []],
            )
            for choice in answer.choices
        ]
    return found


@pytest.mark.timeout(900)
def test_two_ranks_do_all_that_a_request_may_ask_for(two_and_two: LocalDeployment, model: Path) -> None:
    """As one rank of each role does it; sums of two are rounded otherwise, in the last bits."""
    prompt = prompts_of(model)[0]
    with ranked(model, 1, 1, "tls") as running:
        expected = asked_of(running, prompt)
    found = asked_of(two_and_two, prompt)
    for name, wanted in expected.items():
        assert [text for text, _ in found[name]] == [text for text, _ in wanted], name
        for (_, own), (_, theirs) in zip(found[name], wanted, strict=True):
            assert own == pytest.approx(theirs, abs=1e-3), name
    assert json.loads(found["a schema"][0][0]).keys() == {"n"}
    assert len({text for text, _ in found["siblings"]}) == 3
    assert len(found["a scored prompt"][0][1]) == len(prompt) + 8
    assert two_and_two.total("decode", "segue_local_prompts_total") == 0


# ---- a rank of either side dies --------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_streams_that_outgrow_the_pages_leave_and_come_back(
    two_and_two: LocalDeployment, model: Path
) -> None:
    """To pages of the host, of each rank."""
    prompts = prompts_of(model)[:STREAMS]
    answers = crowd(two_and_two.url, prompts, STREAMS, **LONG | {"max_tokens": MANY_TOKENS})
    assert two_and_two.total("decode", "segue_retractions_total") > 0
    assert_answers_of_transformers(model, prompts, answers, MANY_TOKENS)


@pytest.mark.timeout(900)
def test_what_followers_answer_is_counted_as_the_workers(
    two_and_two: LocalDeployment, undisturbed: list[StreamedAnswer]
) -> None:
    """Rank r of decode reads from rank r of prefill: both have answered as many reads of pages."""
    assert len(undisturbed) == STREAMS

    def reads() -> float:
        (prefill,) = two_and_two.processes("prefill")
        page = two_and_two.metrics(prefill)
        return sum(value for name, value in page.items() if name.startswith("segue_kv_reads_total"))

    words = STREAMS  # at least one of a lease word for each fetch, at rank 0 alone
    until(lambda: reads() >= 2 * STREAMS + words, 10, "the reads at both ranks")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_rank_of_either_side_costs_no_stream_a_token(
    role: str, two_and_two: LocalDeployment, model: Path, undisturbed: list[StreamedAnswer]
) -> None:
    """Its worker ends with it, and is started again; what it held is computed again."""
    (worker,) = two_and_two.processes(role)
    said = len(two_and_two.command.read_lines())

    def kill() -> None:
        (follower,) = followers_of(worker.pid)
        os.kill(follower, signal.SIGKILL)

    prompts = prompts_of(model)[:STREAMS]
    assert streamed(two_and_two.url, prompts, kill) == undisturbed
    (lost,) = [line for line in two_and_two.command.read_lines()[said:] if "rank.lost" in line]
    assert "it was ended by SIGKILL" in lost
    until(two_and_two.all_linked, 120, "all workers' readiness")
    until(lambda: not two_and_two.held(), 30, "everything given back")


def streamed(
    url: str, prompts: list[list[int]], disturb: Callable[[], object], tokens: int = LONG["max_tokens"]
) -> list[StreamedAnswer]:
    """Answers to all prompts at once; when two have three pieces of text, this is done."""

    async def run() -> list[StreamedAnswer]:
        begun = [0]

        async def one(prompt: list[int]) -> StreamedAnswer:
            pieces = 0

            def count() -> None:
                nonlocal pieces
                pieces += 1
                begun[0] += pieces == 3
                if pieces == 3 and begun[0] == 2:
                    disturb()

            return await complete(client, prompt, count, **LONG | {"max_tokens": tokens})

        async with client_of(url) as client:
            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(run())


# ---- a worker drains to one of other ranks ---------------------------------------------------------------------------


class DecodeWorkers:
    """Two decode workers of unequal ranks and a router, which nobody starts again."""

    def __init__(self, model: Path, folder: Path, ranks: tuple[int, int]):
        write_new_keys(folder)
        self.port, self.admin = free_port(), free_port()
        links = [free_port() for _ in ranks]
        common = ["--model", str(model), "--host", "127.0.0.1", "--log-level", "info"]
        of_workers = [*common, *HOST_CUDA[:-2], "--kv-interface", "lo", "--kv-layout", "head-major-1"]
        of_workers += [
            "--memory-bytes",
            str(MEMORY_BYTES),
            "--kv-pages",
            "160",
            "--context-len",
            "256",
            "--max-running-requests",
            "8",
        ]
        of_workers += ["--link-keys-file", str(folder / "worker.pem"), "--admin-port", "0"]
        self.workers = [
            Running("-m", "decode", *of_workers, "--tensor-parallel-size", str(each), "--links-port", str(at))
            for each, at in zip(ranks, links, strict=True)
        ]
        addresses = ",".join(f"decode=127.0.0.1:{at}" for at in links)
        of_router = ["--port", str(self.port), "--admin-port", str(self.admin), "--workers", addresses]
        of_router += ["--link-keys-file", str(folder / "router.pem"), "--served-model-name", "smollm2"]
        self.router = Running("-m", "router", *common, *of_router)
        for worker in self.workers:
            worker.line(lambda line: '"worker.ready"' in line, 240)
        until(lambda: self.total("segue_workers{worker_role=decode}") == len(ranks), 60, "their links")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def total(self, name: str) -> float:
        """A figure of the router, over all labels behind this name."""
        page = samples_of(httpx2.get(f"http://127.0.0.1:{self.admin}/metrics").text)
        return sum(value for key, value in page.items() if key.startswith(name))

    def close(self) -> None:
        for each in (self.router, *self.workers):
            each.close()


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_worker_of_four_ranks_drains_to_one_of_two(model: Path, tmp_path: Path) -> None:
    """Its streams' pages are read in slices by the other one, and no prompt is computed again."""
    prompts = prompts_of(model)[:STREAMS]
    running = DecodeWorkers(model, tmp_path / "keys", (4, 2))
    try:
        undisturbed = crowd(running.url, prompts, STREAMS, **LONG | {"max_tokens": MANY_TOKENS})
        drain = lambda: running.workers[0].process.terminate()  # noqa: E731
        assert streamed(running.url, prompts, drain, MANY_TOKENS) == undisturbed
        assert running.workers[0].process.wait(60) == 0
        assert running.total("segue_migrations_total{cause=drain,outcome=migrated}") > 0
        assert running.total("segue_migrations_total{cause=drain,outcome=recomputed}") == 0
    finally:
        running.close()
