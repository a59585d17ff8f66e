"""The paths that say what this server is, and what a client is told at a path that is not served."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from router.replies import REFUSED_PATHS, SERVED_PATHS
from router.text.tokenizer import Tokenizer
from shared.primitives.version import VERSION
from shared.wire.messages import Limits
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import CHAT_TEMPLATE, CONTEXT_LEN, END_ID


def message(response: httpx2.Response) -> str:
    return str(response.json()["error"]["message"])


def test_the_root_lists_the_paths_and_each_of_them_is_there(router: RunningRouter) -> None:
    paths = router.http.get("/").json()["paths"]
    assert paths == SERVED_PATHS
    for path, description in SERVED_PATHS.items():
        get, post = (
            router.http.get(path).status_code,
            router.http.post(path, json={}).status_code,
        )
        assert (get, post) == ((405, 400) if description.startswith("POST") else (200, 405)), path


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1"])
def test_an_unknown_path_is_told_all_paths(router: RunningRouter, path: str) -> None:
    response = router.http.get(path)
    assert response.status_code == 404
    assert all(known in message(response) for known in SERVED_PATHS)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions//", "/chat/completions/"])
def test_an_address_that_is_nearly_right_is_told_the_right_one(router: RunningRouter, path: str) -> None:
    response = router.http.post(path, json={})
    assert response.status_code == 404
    assert message(response).endswith("did you mean /v1/chat/completions?")


@pytest.mark.parametrize("path", REFUSED_PATHS)
def test_a_path_of_another_server_is_refused_with_the_reason(router: RunningRouter, path: str) -> None:
    for asked in (path, f"{path}/marker-51c9"):
        response = router.http.post(asked, json={})
        assert response.status_code == 404
        assert message(response) == f"{path} is not served: {REFUSED_PATHS[path]}"


def test_the_version_is_the_programs(router: RunningRouter) -> None:
    assert router.http.get("/version").json() == {"version": VERSION}


def test_the_tokenizers_info_is_enough_to_render_and_count(router: RunningRouter, model_folder: Path) -> None:
    info = router.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == ("<|end|>", CHAT_TEMPLATE)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert router.http.post("/tokenize", json=body).json()["tokens"] == [END_ID]
    assert info == Tokenizer(model_folder, template_seconds_max=5).info


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(model_folder: Path, method: str) -> None:
    with RunningRouter(model_folder) as router:
        assert router.http.request(method, "/ping").status_code == 200
        router.call(router.health.start_draining)
        assert router.http.request(method, "/ping").status_code == 503


def test_the_context_of_the_model_list_is_what_requests_are_held_to(model_folder: Path) -> None:
    small = Limits(context_len=CONTEXT_LEN // 2, page_size=16, pages=1000, slots=10, vocab_size=400)
    with RunningRouter(model_folder, limits=small) as router:
        assert router.http.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT_LEN // 2
        body = {"model": MODEL, "prompt": "fox", "max_tokens": CONTEXT_LEN // 2}
        assert router.http.post("/v1/completions", json=body).status_code == 400
