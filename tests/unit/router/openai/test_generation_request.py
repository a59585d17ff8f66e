"""What a body becomes: one value for every endpoint, in the form in which it is used. The body does not live on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.config import RouterConfig
from router.openai.answers.resumable_streams import AskedStream, Resuming
from router.openai.completions import Arrival, CompletionEndpoint
from router.openai.fields.ignored import Ignored
from router.openai.fields.states import Endpoint
from router.openai.generation_request import GenerationRequest, RequestReader
from router.openai.prompts.prompts import ChatPrompt, CompletionPrompt, Prompts, Truncation
from router.openai.serving import OpenAIServing
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from shared.wire.sampling_params import SamplingParams
from tests.unit.router.request_contexts import scope_of
from tests.unit.router.scripted_workers import MODEL

USER = {"role": "user", "content": "fox"}
BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": "fox"},
    "responses": {"input": "fox"},
    "messages": {"messages": [USER], "max_tokens": 9},
}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}


@pytest.fixture(scope="module")
def serving(model_folder: Path) -> Iterator[OpenAIServing]:
    settings = RouterConfig(served_model_name=MODEL)
    tokenizer = Tokenizer(model_folder, template_seconds_max=5)
    prompts = Prompts(tokenizer, settings)
    yield OpenAIServing(None, tokenizer, prompts, settings, {}, Resuming(b"secret"))  # type: ignore[arg-type]
    prompts.close()


def read(serving: OpenAIServing, endpoint: Endpoint, **fields: Any) -> GenerationRequest:
    body = json.dumps({"model": MODEL} | BODIES[endpoint] | fields).encode()
    return RequestReader(serving, endpoint).read(body, 256, lambda seed, _: seed, Ignored())


def params_of(request: GenerationRequest, **defaults: float) -> SamplingParams:
    return request.sampling_params(request.limit.behind(1, 100), 100, defaults, request.grammar, ())


@pytest.mark.parametrize("fields", [{"prompt": "fox"}, {"prompt": [5, 6]}, {"messages": [USER]}], ids=str)
def test_a_request_that_is_tokenized_holds_nothing_of_its_body(
    serving: OpenAIServing, fields: dict[str, Any]
) -> None:
    endpoint = CompletionEndpoint(serving, "chat" if "messages" in fields else "completions")
    body = bytearray(json.dumps({"model": MODEL, "stop": ["x"]} | fields).encode())
    scope = scope_of(headers=[(b"idempotency-key", b"k")], path="/")
    asked = AskedStream(serving.resuming, scope, "")
    kept = endpoint._wanted(Arrival("r", "somebody", 1.0, 2.0), body, 256, asked)
    body.clear()  # raises BufferError while anything refers to its bytes
    assert [stop.stop for stop in kept.options.text.stops] == ["x"]
    assert kept.requests[0].token_ids


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_same_words_become_the_same_values_on_every_path(
    serving: OpenAIServing, endpoint: Endpoint
) -> None:
    names: dict[Endpoint, tuple[str, str]] = {
        "responses": ("max_output_tokens", "stop"),
        "messages": ("max_tokens", "stop_sequences"),
    }
    limit, stop = names.get(endpoint, ("max_tokens", "stop"))
    asked = {limit: 5, stop: ["a", "b"], "stream": True, "seed": 4, "cache_salt": "s"}
    asked |= {"deadline_seconds": 2.5}
    request = read(serving, endpoint, **SAMPLING, **asked)
    assert (request.choices, request.limit.tokens, request.seed) == (1, 5, 4)
    assert request.answer.stream
    assert [one.stop for one in request.answer.text.stops] == ["a", "b"]
    assert request.sampling == SAMPLING
    assert request.deadline_seconds == 2.5
    assert len(request.cache_salt) == 32
    assert isinstance(request.prompt, CompletionPrompt if endpoint == "completions" else ChatPrompt)
    assert (request.answer.repeated is not None) == (endpoint == "responses")
    params = params_of(request, temperature=9.0, presence_penalty=1.0)
    assert (params.max_new_tokens, params.seed, params.presence_penalty) == (5, 4, 1.0), "a default stays"
    assert {name: getattr(params, name) for name in SAMPLING} == SAMPLING


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("seconds", [-1, 0, 86_401, 3e10])
def test_a_deadline_that_nobody_could_mean_has_one_sentence_on_every_path(
    serving: OpenAIServing, endpoint: Endpoint, seconds: float
) -> None:
    with pytest.raises(
        RequestError, match=r"deadline_seconds must be above 0 and at most 86400, got"
    ) as raised:
        read(serving, endpoint, deadline_seconds=seconds)
    assert raised.value.param == "deadline_seconds"


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_is_not_said_has_the_value_of_its_default(serving: OpenAIServing, endpoint: Endpoint) -> None:
    request = read(serving, endpoint)
    answer, text = request.answer, request.answer.text
    assert [answer.stream, answer.usage, answer.usage_so_far, answer.tokens_as_ids] == [False] * 4
    assert (answer.likeliest, request.prompt_logprobs) == (-1, None)
    assert not request.tells_of_prompt
    assert (text.stops, text.skip_special_tokens, text.token_ids) == ((), True, False)
    assert (request.grammar, request.seed, request.sampling) == (None, None, {})
    assert (request.cache_salt, request.session, request.deadline_seconds) == ("", "", 0.0)
    room = {"completions": 16, "messages": 9}
    assert request.limit.behind(1, 100) == room.get(endpoint, 99)


def test_what_is_asked_of_a_prompt_goes_with_it(serving: OpenAIServing) -> None:
    asked = {"truncate_prompt_tokens": 7, "truncation_side": "right", "add_special_tokens": False}
    request = read(serving, "completions", **asked)
    assert isinstance(request.prompt, CompletionPrompt)
    assert bytes(request.prompt.prompt) == b'"fox"'
    assert request.prompt.truncation == Truncation(7, keeps_end=False)
    assert not request.prompt.add_special_tokens
    chat = read(serving, "chat", continue_final_message=True, add_generation_prompt=False)
    assert isinstance(chat.prompt, ChatPrompt)
    assert chat.prompt.options.continue_final_message
    assert chat.prompt.truncation is None


def test_a_chats_newer_limit_is_the_one_that_counts(serving: OpenAIServing) -> None:
    request = read(serving, "chat", max_tokens=0, max_completion_tokens=5, prompt_logprobs=1)
    assert (request.limit.field, request.limit.tokens) == ("max_completion_tokens", 5)
    with pytest.raises(RequestError, match="max_completion_tokens is 500") as raised:
        read(serving, "chat", max_completion_tokens=500).limit.behind(1, 100)
    assert raised.value.param == "max_completion_tokens"
    assert read(serving, "messages", max_tokens=500).limit.behind(1, 100) == 99, "there it is a bound"


def test_usage_so_far_is_told_where_the_last_chunk_has_usage(serving: OpenAIServing) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    answer = read(serving, "chat", stream=True, stream_options=both).answer
    assert (answer.usage, answer.usage_so_far) == (True, True)
    alone = {"continuous_usage_stats": True}
    answer = read(serving, "chat", stream=True, stream_options=alone).answer
    assert (answer.usage, answer.usage_so_far) == (False, False)


def test_the_first_wrong_field_is_named_by_the_name_of_the_path(serving: OpenAIServing) -> None:
    with pytest.raises(RequestError) as raised:
        read(serving, "completions", n=0, max_tokens=-1, stop="", truncate_prompt_tokens=0)
    assert raised.value.param == "n"
    with pytest.raises(RequestError) as raised:
        read(serving, "messages", stop_sequences=[""])
    assert raised.value.param == "stop_sequences"


def test_the_grammar_is_a_sampling_parameter(serving: OpenAIServing) -> None:
    params = params_of(read(serving, "chat", regex="a+", max_tokens=5))
    assert params.grammar == Grammar("regex", "a+")
    assert params.features == {"grammar"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params)) == params


def test_a_grammar_says_where_the_answer_ends(serving: OpenAIServing) -> None:
    request = read(serving, "chat", regex="a+", ignore_eos=True)
    with pytest.raises(RequestError, match="grammar") as raised:
        params_of(request)
    assert raised.value.param == "ignore_eos"
