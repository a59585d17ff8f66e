"""Any JSON gets an answer in the shape of its API: never a 500, and never back what was sent."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.fields.table import KNOWN_FIELDS
from tests.fuzzing import fuzzed
from tests.unit.router.conftest import Routers
from tests.unit.router.scripted_workers import MODEL
from tests.unit.router.tiny_model import TinyModel

ANTHROPICS = ["/v1/messages", "/v1/messages/count_tokens"]
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", *ANTHROPICS]
ECHO_CHARS_MAX = 100
MARK = "marker-9d1c-"

NAMES = sorted({*(field.name for field in KNOWN_FIELDS), "tokens", "x"})
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.just(MARK * 20) | st.just("<|end|>")
)
NUMBERS = st.integers() | st.integers(-(10**30), 10**30) | st.just(10**4200) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "source", "include_usage", "5", MARK * 9]),
            inner,
        )
    ),
    max_leaves=8,
)
BLOCK_FIELDS = ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source", "tool")
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "document", "image", MARK])},
        optional=dict.fromkeys(BLOCK_FIELDS, TEXTS | JSON),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", MARK]),
            "content": TEXTS | JSON | BLOCKS,
        }
    ),
    max_size=4,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5)
VALID = {"model": MODEL, "max_tokens": 2, "prompt": "fox", "messages": [{"role": "user", "content": "fox"}]}


@pytest.fixture(scope="module")
def client(routers: Routers) -> httpx2.Client:
    return routers(TinyModel()).http


def check_answer(client: httpx2.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code // 100 in (2, 4), (answer.status_code, body[:200])
    if answer.status_code // 100 == 4:
        error = answer.json()["error"]
        of_anthropic = path in ANTHROPICS
        assert set(error) == ({"message", "type"} if of_anthropic else {"message", "type", "param", "code"})
        assert MARK * (ECHO_CHARS_MAX // len(MARK)) not in answer.text
        assert len(error["message"]) <= 400
        assert len(error.get("param") or "") <= ECHO_CHARS_MAX


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode(errors="surrogatepass")


@fuzzed
@given(path=st.sampled_from(PATHS), body=BODIES, valid=st.booleans(), messages=st.none() | MESSAGES)
def test_any_fields_get_an_answer_in_openais_shape(
    client: httpx2.Client, path: str, body: dict[str, Any], valid: bool, messages: list[Any] | None
) -> None:
    fields = (VALID if valid else {}) | body
    if messages is not None:
        fields["messages"] = messages
    check_answer(client, path, encoded(fields))


@fuzzed
@given(path=st.sampled_from(PATHS), body=JSON)
def test_any_json_gets_an_answer_in_openais_shape(client: httpx2.Client, path: str, body: Any) -> None:
    check_answer(client, path, encoded(body))


@fuzzed
@given(
    path=st.sampled_from(PATHS),
    cuts=st.lists(
        st.tuples(st.integers(0, 200), st.binary(max_size=4) | st.sampled_from([b"\\", b'"', b"[", b"{"]))
    ),
)
def test_any_bytes_get_an_answer_in_openais_shape(
    client: httpx2.Client, path: str, cuts: list[tuple[int, bytes]]
) -> None:
    body = encoded(VALID | {"prompt": ["a\\", 'b"', "c"], "tokens": [1, 2], "stop": ["\\"]})
    for at, inserted in cuts:
        body = body[:at] + inserted + body[at + 1 :]
    check_answer(client, path, body)
