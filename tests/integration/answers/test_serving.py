"""What a newcomer sees first: `segue up`, OpenAI's own client, and KV that really moved between processes."""

from __future__ import annotations

import pytest

from tests.integration.deployments.aggregated import AGGREGATED, needs_prefill
from tests.integration.deployments.cut_model import LAYERS
from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.ranked import RANKED
from tests.integration.deployments.streams import crowd
from tests.waiting import until

LONG = "Why is the sky blue? " * 50  # above 1 MiB of KV, so that the fetch measures its link
# Layers, K|V, KV heads, tokens, head_dim, float16 beside 4-bit weights; ranks share a fourth head, and keep float32.
PAGE_BYTES = len(LAYERS) * 2 * (4 * 16 * 64 * 4 if RANKED else 3 * 16 * 64 * 2)


@needs_prefill("no KV moves")
def test_a_streamed_chat_answer_comes_from_kv_that_moved_between_processes(one_each: LocalDeployment) -> None:
    before = one_each.total("decode", "segue_kv_fetched_bytes_total")
    stream = one_each.client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "system", "content": "No other chat begins so."},  # no page of it is cached
            {"role": "user", "content": LONG},
        ],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usage = chunks[-1].usage
    assert len(text) > 20
    assert usage is not None
    assert usage.completion_tokens == 24
    pages = -(-usage.prompt_tokens // 16)
    fetched_bytes = pages * PAGE_BYTES
    until(
        lambda: one_each.total("decode", "segue_kv_fetched_bytes_total") - before == fetched_bytes,
        5,
        f"{fetched_bytes} bytes fetched",
    )
    (decode,) = one_each.processes("decode")
    speeds = {
        n: v for n, v in one_each.metrics(decode).items() if n.startswith("segue_kv_link_bytes_per_second")
    }
    assert all(speeds.values())
    assert [name for name in speeds if "peer=prefill-0/" in name and "transport=cma/memory" in name]


@pytest.mark.aggregated
def test_a_plain_answer_equals_the_streamed_one(one_each: LocalDeployment) -> None:
    client = one_each.client
    plain = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=20, temperature=0
    )
    stream = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=20, temperature=0, stream=True
    )
    assert plain.choices[0].text == "".join(chunk.choices[0].text for chunk in stream)
    assert plain.choices[0].finish_reason == "length"


def test_the_life_of_a_request_can_be_looked_up(one_each: LocalDeployment) -> None:
    client = one_each.client
    response = client.completions.with_raw_response.create(
        model="smollm2", prompt="The life of a request, from the first byte on:", max_tokens=4
    )
    rid = response.headers["x-request-id"]
    life = client.get(f"{one_each.admin_url}/debug/requests/{rid}", cast_to=dict[str, object])
    for uid in ("decode-0",) if AGGREGATED else ("prefill-0", "decode-0"):
        assert uid in str(life)


def test_all_workers_are_used_when_there_are_two_of_each(two_each: LocalDeployment) -> None:
    def computed(role: str, name: str) -> dict[str, float]:
        return {process.uid: two_each.metrics(process).get(name, 0) for process in two_each.processes(role)}

    def all_since(before: dict[str, float], role: str, name: str) -> bool:
        return all(value > before[uid] for uid, value in computed(role, name).items())

    names = {"prefill": "segue_extend_tokens_total", "decode": "segue_kv_fetched_bytes_total"}
    if AGGREGATED:
        names = {"decode": "segue_extend_tokens_total"}
    before = {role: computed(role, name) for role, name in names.items()}
    assert all(len(workers) == 2 for workers in before.values())
    prompts = [f"Worker number {k} says" for k in range(12)]
    answers = crowd(two_each.url, prompts, 6, max_tokens=12, temperature=0)
    assert [answer.completion_tokens for answer in answers] == [12] * 12
    for role, name in names.items():
        until(lambda: all_since(before[role], role, name), 5, f"work of both {role} workers")  # noqa: B023
    until(lambda: not two_each.held(), 5, "everything given back")
