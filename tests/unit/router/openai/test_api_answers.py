"""What clients get: OpenAI's own client against the running server, with workers whose output is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import CONTEXT_LEN

README = Path(__file__).parents[4] / "README.md"
TEXT = "Héllo 日本 🙂🦊, the quick brown fox."


@pytest.fixture
def router(router: RunningRouter) -> RunningRouter:
    """One of workers that always say `TEXT`."""
    router.says(TEXT)
    return router


def events_of(response: httpx2.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]


def test_a_completion_has_the_text_and_counts_the_tokens(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    tokens = router.says(TEXT)
    answer = client.completions.create(model=MODEL, prompt="fox", max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode("fox"))
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    assert answer.id.startswith("cmpl-")


def test_a_chat_is_rendered_with_the_models_template(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    rendered = "<|start|>system\nBe brief.<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode_all(router.last_prefill.token_ids) == rendered
    assert router.last_prefill.params.max_new_tokens == CONTEXT_LEN - len(router.last_prefill.token_ids)


@pytest.mark.parametrize("row", [1, 3, 100], ids="{} tokens a message".format)
def test_a_streamed_chat_joins_to_the_same_text_without_half_a_character(
    client: openai.OpenAI, router: RunningRouter, row: int
) -> None:
    tokens = router.says(TEXT, row=row)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == tokens
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_a_streamed_completion_ends_with_done_and_has_usage_only_on_request(router: RunningRouter) -> None:
    body = {"model": MODEL, "prompt": "fox", "stream": True, "max_tokens": 100}
    response = router.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(response)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert all("usage" not in chunk for chunk in chunks)


def test_sixteen_tokens_are_the_default_of_a_completion(client: openai.OpenAI, router: RunningRouter) -> None:
    router.says(TEXT * 3, end=False)
    answer = client.completions.create(model=MODEL, prompt="fox")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_that_spans_tokens_ends_the_answer_and_is_left_out(
    client: openai.OpenAI, stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="fox", max_tokens=100, stop=["zebra", "quick br"], stream=stream
    )
    pieces = list(answer) if isinstance(answer, openai.Stream) else [answer]
    assert "".join(piece.choices[0].text for piece in pieces) == TEXT[: TEXT.index("quick")]
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_stop_token_ends_the_answer_without_its_text(
    client: openai.OpenAI, router: RunningRouter, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode("the fox.", add_special_tokens=False)
    router.workers.script = Script(output=lambda _: output)
    answer = client.completions.create(
        model=MODEL, prompt="fox", max_tokens=len(output), extra_body={"stop_token_ids": [output[-1]]}
    )
    assert answer.choices[0].text == "the fox"


PROMPTS = {
    "text": ("fox", 1),
    "token ids": ([5, 6, 7], 1),
    "several texts": (["fox", "dog", "fox"], 3),
    "several lists of token ids": ([[5, 6], [7]], 2),
}


@pytest.mark.parametrize(("prompt", "count"), PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_prompts_come_in_four_forms_and_each_prompt_is_a_choice(
    client: openai.OpenAI, router: RunningRouter, prompt: str, count: int, stream: bool
) -> None:
    heard = len(router.workers.prefills)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100, stream=stream)
    pieces = list(answer) if isinstance(answer, openai.Stream) else [answer]
    texts = dict.fromkeys(range(count), "")
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == dict.fromkeys(range(count), TEXT)
    assert len(router.workers.prefills) == heard + count


def test_all_sampling_parameters_reach_the_workers(client: openai.OpenAI, router: RunningRouter) -> None:
    client.completions.create(
        model=MODEL,
        prompt="fox",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=42,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={"7": -3},
        extra_body={
            "top_k": 20,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
        },
    )
    params = router.last_prefill.params
    assert (params.max_new_tokens, params.min_new_tokens, params.seed) == (9, 2, 42)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 20, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.25, -0.5, 1.5)
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({7: -3.0}, (9,), True)


def test_top_k_minus_one_means_all_as_in_vllm(client: openai.OpenAI, router: RunningRouter) -> None:
    client.completions.create(model=MODEL, prompt="fox", extra_body={"top_k": -1})
    assert router.last_prefill.params.top_k == 0


def test_top_p_zero_leaves_the_likeliest_token_alone_as_at_openai(
    client: openai.OpenAI, router: RunningRouter
) -> None:
    client.completions.create(model=MODEL, prompt="fox", temperature=0.7, top_p=0)
    params = router.last_prefill.params
    assert (params.temperature, params.top_p) == (0.0, 1.0)


def test_requests_without_a_seed_get_different_ones(client: openai.OpenAI, router: RunningRouter) -> None:
    for _ in range(2):
        client.completions.create(model=MODEL, prompt="fox")
    first, second = router.workers.prefills[-2:]
    assert first.params.seed != second.params.seed


def test_a_cache_salt_keeps_caches_apart_and_is_not_sent_to_workers(
    client: openai.OpenAI, router: RunningRouter
) -> None:
    for salt in ("pepper", "pepper", "sugar", None):
        client.completions.create(model=MODEL, prompt="fox", extra_body={"cache_salt": salt})
    keys = [prefill.extra_key for prefill in router.workers.prefills[-4:]]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] not in keys[:3]
    assert "pepper" not in keys[0]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_text_survives_tokenize_and_detokenize(router: RunningRouter, tokenizer: Tokenizer) -> None:
    answer = router.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == list(tokenizer.encode(TEXT))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == CONTEXT_LEN
    back = router.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": TEXT}


def test_tokenize_counts_a_chat_as_the_chat_endpoint_does(router: RunningRouter) -> None:
    messages = [{"role": "user", "content": "hi"}]
    counted = router.http.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = router.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == counted


def test_probes_and_metrics_answer(client: openai.OpenAI, router: RunningRouter) -> None:
    client.completions.create(model=MODEL, prompt="fox", max_tokens=100)
    assert router.http.get(f"{router.admin_url}/livez").text == "ok\n"
    assert router.http.get(f"{router.admin_url}/readyz").json()["ready"] is True
    metrics = router.http.get(f"{router.admin_url}/metrics").text
    assert 'segue_requests_total{outcome="stop",role="router"}' in metrics


def test_health_and_readyz_answer_readiness(router: RunningRouter) -> None:
    pages = f"{router.url}/health", f"{router.admin_url}/readyz"
    assert [router.http.get(page).status_code for page in pages] == [200, 200]
    router.health.become_unready("ending")
    try:
        for page in pages:
            refused = router.http.get(page)
            assert refused.status_code == 503
            assert refused.json()["doing"] == "ending"
    finally:
        router.health.become_ready()


@pytest.mark.parametrize(("start", "here", "elsewhere"), [("| Paths | ", 12, 0), ("| Admin port | ", 4, 1)])
def test_every_path_that_the_readme_names_is_there_and_on_its_port_alone(
    router: RunningRouter, start: str, here: int, elsewhere: int
) -> None:
    line = next(line for line in README.read_text().splitlines() if line.startswith(start))
    paths = re.findall(r"`(/[^`]*)`", line)
    assert len(paths) == here
    paths = [path for path in paths if path != "/"]  # on both: the live page is on the admin port's
    urls = [router.url, router.admin_url]
    for path in paths:
        for url in (urls[elsewhere], urls[1 - elsewhere]):
            answer = router.http.get(url + path.replace("{id}", "unknown"))
            absent = "nothing at this path" in answer.text or "is on the admin port" in answer.text
            assert absent == (url != urls[elsewhere]), (url, path)


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz", "/debug/requests/unknown"])
def test_a_page_of_the_admin_port_is_not_found_on_the_api_port_but_named(
    router: RunningRouter, path: str
) -> None:
    answer = router.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"/{path.split('/')[1]} is on the admin port"
    assert "admin" not in router.http.get("/debugger").text


def test_an_unknown_path_is_answered_with_those_that_are_there(router: RunningRouter) -> None:
    message = router.http.post("/v1/nothing", json={}).json()["error"]["message"]
    named = re.findall(r"/v1/[a-z_/]+", message)
    assert len(named) == 6
    assert all("nothing at this path" not in router.http.get(path).text for path in named)


def test_the_request_id_of_the_answer_leads_to_what_became_of_it(router: RunningRouter) -> None:
    for prompt, choices in (("fox", 1), (["fox", "dog"], 2)):
        response = router.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        rid = response.headers["x-request-id"]
        assert response.json()["id"] == f"cmpl-{rid}"
        for known_as in (rid, f"cmpl-{rid}"):
            debug = router.http.get(f"{router.admin_url}/debug/requests/{known_as}").json()
            choices_seen = debug.get("choices", [debug])
            assert len(choices_seen) == choices
            assert {worker["role"] for one in choices_seen for worker in one["workers"]} == {
                "prefill",
                "decode",
            }
    assert router.http.get(f"{router.admin_url}/debug/requests/unknown").status_code == 404


def test_what_clients_wrote_is_in_no_error_metric_or_debug_page(router: RunningRouter) -> None:
    marker = "marker-51c9"
    fields = {"model": MODEL, "prompt": marker, "stop": [marker], "user": marker, marker: marker}
    headers = {"authorization": f"Bearer {marker}", "x-request-id": marker}
    good = router.http.post(f"/v1/completions?{marker}", json=fields, headers=headers)
    assert good.status_code == 200
    bad = [
        router.http.post("/v1/completions", json=fields | {"n": 0}, headers=headers),
        router.http.post("/v1/completions", json=fields | {"model": marker}),
        router.http.post("/v1/completions", content=marker),
        router.http.get(f"/{marker}"),
        router.http.get(f"/v1/models/{marker}"),
        router.http.get(f"{router.admin_url}/debug/requests/{marker}"),
    ]
    assert all(response.status_code >= 400 for response in bad)
    pages = [router.http.get(f"{router.admin_url}/debug/requests/{good.headers['x-segue-request-id']}")]
    pages.append(router.http.get(f"{router.admin_url}/metrics"))
    echoed = {"x-request-id": marker}  # in the head of a client's own answer
    heads = [
        [item for item in answer.headers.items() if item not in echoed.items()] for answer in (*bad, *pages)
    ]
    said = [f"{answer.text}{head}" for answer, head in zip((*bad, *pages), heads, strict=True)]
    assert not any(marker in text for text in said)
