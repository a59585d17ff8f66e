"""Nothing is passed over in silence: a field is served, refused by name, or named in the answer."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from router.openai.fields.generation_fields import ChatFields, CompletionFields, GenerationFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.spelling import edits
from router.openai.fields.states import BOTH, Endpoint
from router.openai.fields.table import (
    KNOWN_FIELDS,
    NAMES_MAX,
    NEUTRAL_BYTES_MAX,
    OTHER_ENDPOINTS,
    fields_of,
    is_neutral,
    read_by_table,
)
from router.openai.messages.fields import MessagesFields
from router.openai.responses.fields import ResponsesFields
from shared.primitives.errors import RequestError

KINDS: dict[Endpoint, type[GenerationFields]] = {"chat": ChatFields, "completions": CompletionFields}
STRUCTS: dict[Endpoint, type[msgspec.Struct]] = {
    **KINDS,
    "responses": ResponsesFields,
    "messages": MessagesFields,
}
PROMPTS: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": []},
    "completions": {"prompt": "fox"},
    "responses": {"input": "fox"},
    "messages": {"messages": []},
}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
WEATHER = {"role": "assistant", "content": "The weather is"}

# 100 fields that clients of other servers send, each with a value that would change the output there.
ASKING: dict[str, Any] = {
    # OpenAI
    "n": 2, "best_of": 3, "logprobs": True, "top_logprobs": 3, "echo": True, "suffix": "end", "tools": [TOOL],
    "tool_choice": "required", "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "audio": {"voice": "x"}, "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "a"}, "web_search_options": {}, "moderation": {"a": 1},
    # vLLM
    "allowed_token_ids": [5], "bad_words": ["fox"], "prompt_logprobs": 1, "logprob_token_ids": [5],
    "return_token_ids": True, "return_tokens_as_token_ids": True, "return_prompt_text": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "reasoning_effort": "high",
    "truncate_prompt_tokens": 4, "truncation_side": "left", "use_beam_search": True, "length_penalty": 2.0,
    "early_stopping": True, "logits_processors": ["a.b"], "prompt_embeds": "AAAA", "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": "root ::= 'a'",
    "guided_decoding_backend": "outlines", "guided_whitespace_pattern": " ?", "structural_tag": "{}",
    "thinking_token_budget": 5, "kv_transfer_params": {"do_remote_decode": True}, "vllm_xargs": {"a": 1},
    "priority": 3, "add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": False,
    "chat_template": "{{ messages }}", "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"text": "a"}], "media_io_kwargs": {"a": 1}, "mm_processor_kwargs": {"a": 1},
    # SGLang
    "regex": "a+", "ebnf": "root ::= 'a'", "json_schema": "{}", "no_stop_trim": True, "stop_regex": "a+",
    "lora_path": "x", "session_params": {"id": "a"}, "custom_logit_processor": "x", "custom_params": {"a": 1},
    "input_ids": [5], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
    "token_ids_logprob": [5], "return_hidden_states": True, "bootstrap_host": "a", "bootstrap_port": 1,
    "bootstrap_room": 1, "data_parallel_rank": 1, "min_new_tokens": 5, "max_new_tokens": 5,
    # others
    "grammar": "root ::= 'a'", "format": "json", "options": {"num_predict": 5}, "num_predict": 5, "n_predict": 5,
    "repeat_penalty": 1.5, "stop_sequences": ["a"], "system": "be brief", "do_sample": False, "num_beams": 4,
    "typical_p": 0.5, "tfs_z": 0.5, "mirostat": 2, "dynatemp_range": 0.5, "dry_multiplier": 0.8,
    "xtc_probability": 0.5, "top_n_sigma": 1.0, "samplers": ["top_k"], "no_repeat_ngram_size": 3, "watermark": True,
    "adapter_id": "x", "negative_prompt": "bad", "guidance_scale": 1.5, "images": ["AAAA"], "thinking": True,
    "enable_thinking": False, "random_seed": 5,
}  # fmt: skip


def body(endpoint: Endpoint, **fields: Any) -> bytes:
    return json.dumps({"model": "m"} | PROMPTS[endpoint] | fields).encode()


def refusal(endpoint: Endpoint, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        read(endpoint, **fields)
    return raised.value


def read(endpoint: Endpoint, **fields: Any) -> msgspec.Struct:
    return read_by_table(body(endpoint, **fields), endpoint, STRUCTS[endpoint], Ignored())


def ignored_of(endpoint: Endpoint, **fields: Any) -> str:
    """What the header says of a body."""
    ignored = Ignored()
    read_by_table(body(endpoint, **fields), endpoint, STRUCTS[endpoint], ignored)
    return "".join(value.decode() for _, value in ignored.headers)


def test_a_hundred_are_tried() -> None:
    assert len(ASKING) >= 100


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("endpoint", BOTH)
def test_a_field_that_asks_for_something_is_served_refused_or_named(endpoint: Endpoint, name: str) -> None:
    known = fields_of(endpoint).get(name)
    if known and (known.state in ("served", "alias", "no effect") or ASKING[name] in known.neutral):
        return  # served elsewhere in these tests; no effect is a remark of the table
    if (known and known.state == "refused") or name in OTHER_ENDPOINTS:
        error = refusal(endpoint, **{name: ASKING[name]})
        assert error.param == name
        assert str(error).startswith(name)
    else:
        assert ignored_of(endpoint, **{name: ASKING[name]}) == name


@pytest.mark.parametrize("endpoint", BOTH)
def test_the_served_fields_of_the_table_are_those_of_the_struct(endpoint: Endpoint) -> None:
    served = {name for name, field in fields_of(endpoint).items() if field.state == "served"}
    assert served == set(KINDS[endpoint].__struct_fields__)


def test_each_field_stands_once() -> None:
    counted = Counter((field.name, endpoint) for field in KNOWN_FIELDS for endpoint in field.endpoints)
    assert [entry for entry, count in counted.items() if count > 1] == []


@pytest.mark.parametrize(
    ("endpoint", "create"), [("chat", ChatCompletions.create), ("completions", Completions.create)]
)
def test_the_table_has_every_parameter_of_the_openai_package(endpoint: Endpoint, create: Any) -> None:
    parameters = set(inspect.signature(create).parameters) - OF_THE_CLIENT
    assert parameters - set(fields_of(endpoint)) == set()


def test_refused_fields_say_what_to_do_instead() -> None:
    assert [field.name for field in KNOWN_FIELDS if field.state == "refused" and not field.remark] == []


@pytest.mark.parametrize(
    "field", [field for field in KNOWN_FIELDS if field.neutral], ids=lambda each: each.name
)
def test_values_that_ask_for_nothing_are_accepted(field: Any) -> None:
    for endpoint in field.endpoints:
        for value in (*field.neutral, None):
            if field.state in ("refused", "passed over"):
                assert ignored_of(endpoint, **{field.name: value}) == ""


def test_a_slip_of_the_finger_is_no_silence() -> None:
    assert "did you mean temperature?" in str(refusal("chat", tempreature=0))
    assert "did you mean max_tokens?" in str(refusal("completions", max_token=3))


@pytest.mark.parametrize(
    "name", ["topP", "TopK", "minP", "maxTokens", "responseFormat", "top-p", "Temperature"]
)
def test_a_name_in_other_letters_is_no_silence(name: str) -> None:
    assert f"{name} is not a field; did you mean" in str(refusal("chat", **{name: 1}))


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ("responses", {"text": {"fromat": {"type": "json_object"}}}, "text.fromat"),
        ("responses", {"text": {"format": {"type": "json_schema", "schem": {}}}}, "text.format.schem"),
    ],
)
def test_a_slip_within_a_field_is_no_silence(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="did you mean") as raised:
        read(endpoint, **fields)
    assert raised.value.param == param


def test_words_that_no_server_knows_are_passed_over_within_fields() -> None:
    fields = read("chat", stream_options={"include_usage": True, "zebra": 1})
    assert isinstance(fields, ChatFields)
    assert fields.stream_options is not None
    assert fields.stream_options.include_usage


def test_words_that_no_server_knows_are_passed_over_and_named() -> None:
    assert ignored_of("chat", zebra={"a": [1]}, x_trace="abc") == "zebra, x_trace"
    assert ignored_of("chat", zebra=None) == "zebra", "what it asks for is not known"


def test_a_field_of_another_path_is_named_and_one_that_makes_it_another_question_refused() -> None:
    assert str(refusal("completions", messages=[WEATHER])) == "messages is not a field of this path"
    assert ignored_of("completions", messages=None) == ""
    assert ignored_of("chat", include=["usage"], input="a", stop_regex=None) == "include, input"
    assert ignored_of("completions", parallel_tool_calls=True, reasoning_effort="low") != ""


def test_what_another_path_serves_is_no_slip() -> None:
    assert ignored_of("messages", min_tokens=5) == "min_tokens", "a field of chats, not max_tokens"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("response_format", {"type": "json_object"}, "text.format"),
        ("reasoning_effort", "high", "reasoning.effort"),
        ("n", 2, "/v1/chat/completions has n"),
    ],
)
def test_a_response_refuses_what_it_has_under_another_name(name: str, value: object, said: str) -> None:
    error = refusal("responses", **{name: value})
    assert (error.param, said in str(error)) == (name, True)
    assert ignored_of("responses", response_format={"type": "text"}, n=1) == ""


def test_more_names_than_any_client_sends_are_not_looked_at() -> None:
    many = {f"x{number}": number for number in range(NAMES_MAX)}
    assert ignored_of("chat", **many, tempreature=0) == ""
    refusal("chat", tempreature=0, **dict(list(many.items())[: NAMES_MAX // 2]))


# Fields of Groq, OpenRouter, SillyTavern, KoboldCpp, Together, Fireworks, DeepInfra, vLLM, SGLang and llama.cpp, of
# which a guard against slips once took some for misspelt ones.
REAL_NAMES = """
reasoning_format thinking_budget typical sampler_seed repetition_penalty_range id session top_n return_prompt_token_ids
max_prompt_tokens reasoning include input temp rep_pen tfs nsigma ban_eos_token banned_strings thinking_config typical_p
rep_pen_range rep_pen_slope rep_pen_decay top_a min_keep smoothing_curve dry_penalty_last_n adaptive_target speed usage
provider transforms route models plugins preset max_price trace trace_id session_id chat_id title tags user_id perf
perf_metrics_in_response prompt_truncate_len context_length_exceeded_behavior raw_output echo_last speculation
safety_model compliance search_settings citation_options include_domains exclude_domains disable_tool_validation
stream_n step steps max_steps prompts model_id messages_id token tokens stops seeds min_k stream_id max_retries
timeout num_retries api_base api_key drop_params mock_response n_probs n_keep id_slot slot_id cache_control
post_sampling_probs timings_per_token return_progress t_max_predict_ms lora max_context_length truncation_length
custom_token_bans sampler_order sampler_priority samplers grammar_string use_default_badwordsids memory genkey quiet
trim_stop legacy_api api_type api_server temperature_last dynatemp_low dynatemp_high skew xtc_threshold skip_cache
top_k_return max_loops variables features background_tasks tool_ids files filter_ids params stream_tokens
enable_search incremental_output result_format tool_stream search_parameters deferred citations betas container
anthropic_version output_config safety_settings cached_content litellm_trace_id guardrails conversationId
""".split()  # noqa: SIM905


def test_names_of_other_servers_are_no_slips() -> None:
    assert len(REAL_NAMES) >= 129
    for endpoint in STRUCTS:
        for name in REAL_NAMES:
            known = fields_of(endpoint).get(name)
            if known is None or known.state in ("passed over", "no effect"):
                read(endpoint, **{name: 2})


@pytest.mark.parametrize(
    "name",
    [
        *("tempreature", "temperture", "max_token", "max_tokes", "top_logprob", "stopTokenIds"),
        *("toolz", "strem", "stream_option", "function"),
    ],
)
def test_one_edit_or_two_of_a_long_name_are_a_slip(name: str) -> None:
    assert "did you mean" in str(refusal("chat", **{name: 1}))


def test_the_distance_of_names_is_that_of_edits() -> None:
    assert [edits(a, b) for a, b in (("", "ab"), ("ab", "ba"), ("seed", "speed"), ("top_k", "top_p"))] == [
        2,
        1,
        1,
        1,
    ]


def test_a_name_of_another_server_is_served_where_it_means_the_same() -> None:
    fields = read("chat", temp=0.3, n_predict=7, stop_sequences=["a"], random_seed=5, grammar="root ::= 'a'")
    assert isinstance(fields, ChatFields)
    assert (fields.temperature, fields.max_tokens, fields.stop, fields.seed) == (0.3, 7, ["a"], 5)
    assert bytes(fields.guided_grammar) == b"\"root ::= 'a'\""
    assert str(refusal("chat", temp="warm")).startswith("temp: Expected")
    assert isinstance(served := read("responses", max_tokens=5), ResponsesFields)
    assert served.max_output_tokens == 5


def test_a_field_goes_before_its_alias() -> None:
    fields = read("chat", temp=0.3, temperature=0.5, n_predict=-1)
    assert isinstance(fields, ChatFields)
    assert (fields.temperature, fields.max_tokens) == (0.5, None)
    assert ignored_of("chat", temp=0.3, temperature=0.5) == "temp"
    assert ignored_of("chat", temp=0.5, temperature=0.5) == ""
    assert ignored_of("chat", temp=0.5, temperature=None) == ""


def test_aliases_mean_served_fields() -> None:
    for field in KNOWN_FIELDS:
        for endpoint in field.endpoints if field.state == "alias" else ():
            assert field.alias_of in STRUCTS[endpoint].__struct_fields__


def test_errors_name_types_as_json_does() -> None:
    assert str(refusal("chat", max_tokens="5")) == "max_tokens: Expected `integer | null`, got `string`"


def test_fields_that_may_be_large_stay_bytes_until_they_are_counted() -> None:
    fields = read("completions", prompt=[[1], [2]])
    assert isinstance(fields, CompletionFields)
    assert bytes(fields.prompt) == b"[[1], [2]]"
    chat = read("chat", messages=[])
    assert isinstance(chat, ChatFields)
    assert bytes(chat.messages) == b"[]"


def test_small_fields_are_bounded_together() -> None:
    with pytest.raises(RequestError, match="beside the prompt"):
        read("completions", stop=["x" * 200_000] * 3)


def test_a_long_value_of_an_unsupported_field_is_not_decoded() -> None:
    assert is_neutral(b" " * (NEUTRAL_BYTES_MAX - 1) + b"1", (1,))
    assert not is_neutral(b" " * NEUTRAL_BYTES_MAX + b"1", (1,))
    assert not is_neutral(b"[" * (NEUTRAL_BYTES_MAX + 1), (1,)), "or it would be malformed"
