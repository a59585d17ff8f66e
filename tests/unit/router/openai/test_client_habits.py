"""Small things that clients do, and that are none of their faults: each is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.router.scripted_workers import MODEL, RunningRouter

HUB_ID = "Org/Tiny-Instruct"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def named(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, model_aliases=(HUB_ID, "gpt-4o", MODEL)) as running:
        yield running


def post(router: RunningRouter, path: str, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return router.http.post(path, content=content, headers=headers)


@pytest.mark.parametrize("name", [MODEL, HUB_ID, "gpt-4o", "", None], ids=str)
def test_a_model_has_several_names_and_may_be_left_out(named: RunningRouter, name: str | None) -> None:
    for path, fields in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "fox"}),
        ("/v1/responses", {"input": "fox"}),
    ):
        answer = post(named, path, fields | ({} if name is None else {"model": name}))
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL), answer.text


def test_the_list_of_models_has_every_name_once_and_says_which_is_the_first(named: RunningRouter) -> None:
    listed = named.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL, HUB_ID, "gpt-4o"]
    assert {model["root"] for model in listed} == {MODEL}
    assert named.http.get(f"/v1/models/{HUB_ID}").json()["id"] == HUB_ID
    assert post(named, "/v1/completions", {"prompt": "fox", "model": "other"}).status_code == 404


def test_the_id_of_a_client_is_in_its_answer_and_so_is_ours(router: RunningRouter) -> None:
    answer = post(router, "/v1/chat/completions", CHAT, **{"x-request-id": "trace-1:a/b+c="})
    assert answer.headers["x-request-id"] == "trace-1:a/b+c="
    ours = answer.headers["x-segue-request-id"]
    assert answer.json()["id"] == f"chatcmpl-{ours}"
    assert router.http.get(f"{router.admin_url}/debug/requests/{ours}").status_code == 200


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a,b", '"', "ä", "<script>"], ids=repr)
def test_an_id_that_is_no_plain_word_is_not_repeated(router: RunningRouter, given: str) -> None:
    headers = [(b"x-request-id", given.encode())]
    answer = router.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.headers["x-request-id"] == answer.headers["x-segue-request-id"]


def test_a_body_may_begin_with_a_byte_order_mark(router: RunningRouter) -> None:
    assert (
        post(router, "/v1/chat/completions", b"\xef\xbb\xbf" + json.dumps(CHAT).encode()).status_code == 200
    )
    assert post(router, "/v1/chat/completions", b"\xef\xbb\xbf\xef\xbb\xbf{}").status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/responses/", "/v1/completions/"])
def test_a_slash_at_the_end_of_a_path_is_no_other_path(router: RunningRouter, path: str) -> None:
    bodies: dict[str, Any] = {"/v1/responses/": {"input": "fox"}, "/v1/completions/": {"prompt": "fox"}}
    answer = post(router, path, bodies.get(path, CHAT))
    assert answer.status_code == 200, answer.text
    assert router.http.get("/v1/models/").status_code == 200


def test_a_wrong_path_is_said_before_a_wrong_content_type(router: RunningRouter) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert post(router, "/v1/nothing", b"{}", **form).status_code == 404
    assert post(router, "/v1/chat/completions", b"{}", **form).status_code == 415
    assert post(router, "/v1/chat/completions/", b"{}", **form).status_code == 415


def test_a_high_temperature_and_128_answers_are_served(router: RunningRouter) -> None:
    answer = post(router, "/v1/chat/completions", CHAT | {"temperature": 5.5, "n": 128})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 128
    assert router.last_prefill.params.temperature == 5.5


def test_null_is_the_default_where_tokens_are_counted_too(router: RunningRouter) -> None:
    names = "add_special_tokens add_generation_prompt continue_final_message chat_template_kwargs tools"
    nulls = dict.fromkeys([*names.split(), "return_token_strs", "model"])
    for asked in ({"prompt": "fox"}, {"messages": CHAT["messages"]}):
        answer = post(router, "/tokenize", asked | nulls)
        assert (answer.status_code, answer.json()) == (200, post(router, "/tokenize", asked).json())


@pytest.mark.parametrize("field", ["seed", "random_seed"])
def test_a_seed_of_minus_one_is_any_as_at_other_servers(router: RunningRouter, field: str) -> None:
    """SillyTavern sends it unless a seed is set: what it asks for again would be the same text each time."""
    drawn = []
    for seed in (-1, -1, 7):
        assert post(router, "/v1/chat/completions", CHAT | {field: seed}).status_code == 200
        drawn.append(router.last_prefill.params.seed)
    assert len({*drawn}) == 3
    assert drawn[-1] == 7


def test_more_prompts_are_a_setting(model_folder: Path) -> None:
    with RunningRouter(model_folder, prompts_max=300) as router:
        answer = post(router, "/v1/completions", {"prompt": ["fox"] * 300, "max_tokens": 1})
        assert len(answer.json()["choices"]) == 300
        assert post(router, "/v1/completions", {"prompt": ["fox"] * 301}).status_code == 400
