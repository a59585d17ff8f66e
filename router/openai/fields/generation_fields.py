"""The served fields of a completion and of a chat, as they come in JSON. Null means the default everywhere.

Requests of /v1/responses and /v1/messages become a chat's. What becomes of all other fields is in `table`. Prompts,
messages, tools and schemas are kept as bytes until it is known how large they are.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from router.openai.fields.thinking import ReasoningObject, ThinkingObject

NULL = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedSamplingFields(msgspec.Struct, kw_only=True):
    """The fields of every API that are parameters of sampling by the same names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """The parameters that a body gives, by name."""
        return {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}


class SamplingFields(SharedSamplingFields, kw_only=True):
    """And those that Anthropic's API does not have."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None


SAMPLING = SamplingFields.__struct_fields__
SAMPLING_OF_ENGINES = {  # those that vLLM and SGLang add to every API, with a remark
    "min_p": "0 to 1",
    "repetition_penalty": "0.01 to 10",
}


class GenerationFields(SamplingFields, kw_only=True):
    """What completions and chats have in common."""

    caps_max_tokens: ClassVar[bool] = False  # of more than the context leaves, all that it leaves is taken

    model: str | None = None  # there is one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    n: int | None = None  # answers to each prompt
    best_of: int | None = None  # n, if it is there
    cache_salt: str | None = None  # requests of different salts share no prefix cache
    prompt_cache_key: str | None = None  # requests of one key prefer one worker
    deadline_seconds: float | None = None  # until the first token
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # what is cut off
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for it
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    prompt_logprobs: int | None = None  # how many of the likeliest, with each token of the prompt

    # what the answer must look like: at most one of them may ask for something
    response_format: msgspec.Raw = NULL
    structured_outputs: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL
    guided_regex: msgspec.Raw = NULL
    guided_choice: msgspec.Raw = NULL
    guided_grammar: msgspec.Raw = NULL
    structural_tag: msgspec.Raw = NULL
    json_schema: msgspec.Raw = NULL
    regex: msgspec.Raw = NULL
    ebnf: msgspec.Raw = NULL


class CompletionFields(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw
    logprobs: int | bool | None = None  # how many of the likeliest; false: none, as in chats
    add_special_tokens: bool | None = None
    echo: bool | None = None  # the prompt begins the answer, and its logprobs theirs


class ChatFields(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: msgspec.Raw
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | str | ThinkingObject | None = None
    think: bool | str | None = None
    reasoning: ReasoningObject | None = None
    disable_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: str | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
