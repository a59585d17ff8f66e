"""Every field of OpenAI's /v1/responses, and what becomes of it; a part of `known`."""

from __future__ import annotations

from router.openai.fields.of_openai import NO_TOOLS_OF_ITS_OWN, TEXT_ONLY
from router.openai.fields.states import RESPONSES, no_effect, passed_over, refused, served

_NOT_STORED = "nothing is stored here: send the whole conversation as input"
RESPONSES_FIELDS = (
    *served(
        "OpenAI",
        RESPONSES,
        {
            "model": "may be left out: there is one; /v1/models has its names",
            "input": "text, or items: message, reasoning, calls of functions and custom tools and their outputs",
            "instructions": "the system message; one with the input's own",
            "stream": "typed events",
            "max_output_tokens": "at least 1; all that the context leaves by default",
            "temperature": "0 to 1,000; 0 is greedy",
            "top_p": "above 0, up to 1",
            "tools": "function, custom and namespace; a server's own, as web_search, are left out and named",
            "tool_choice": "none, auto, required, a function, a custom tool, or allowed_tools",
            "parallel_tool_calls": "",
            "text": "format: text, json_object or json_schema",
            "reasoning": "effort goes to the template; summaries are not made",
            "include": "message.output_text.logprobs; what else there is belongs to tools and reasoning of OpenAI",
            "top_logprobs": "up to 20",
            "metadata": "comes back with the answer",
            "prompt_cache_key": "requests of one key prefer one worker",
        },
    ),
    *served(
        "vLLM",
        RESPONSES,
        {
            "top_k": "0 or -1: all",
            "frequency_penalty": "-2 to 2",
            "presence_penalty": "-2 to 2",
            "stop": "up to 16 strings of up to 1,024 characters",
            "seed": "as in a chat",
            "cache_salt": "requests of different salts share no prefix cache",
            "chat_template_kwargs": "as in a chat",
        },
    ),
    *served(
        "others",
        RESPONSES,
        {"enable_thinking": "as in a chat", "thinking": "as in a chat"},
    ),
    *refused(
        "OpenAI",
        RESPONSES,
        {
            "previous_response_id": _NOT_STORED,
            "conversation": _NOT_STORED,
            "prompt": "prompts are not stored here: send its text as instructions",
            "background": ("nothing is stored here: an answer comes on the connection", (False,)),
            "image": TEXT_ONLY,
        },
    ),
    *refused(
        "others",
        RESPONSES,
        {
            "response_format": ("the name here is text.format", ({"type": "text"},)),
            "reasoning_effort": "the name here is reasoning.effort",
            "n": ("a response is one answer: /v1/chat/completions has n", (1,)),
        },
    ),
    *passed_over(
        "OpenAI",
        RESPONSES,
        {
            "truncation": ("an input that is too long is refused", ("disabled",)),
            "context_management": ("an input is not shortened", ([],)),
            "moderation": "nothing is moderated here",
            "access_programs": NO_TOOLS_OF_ITS_OWN,
        },
    ),
    *no_effect(
        "OpenAI",
        RESPONSES,
        {
            "store": "nothing is stored; the answer says so",
            "background_options": "they belong to background",
            "stream_options": "events are not obfuscated, and the last one has usage",
            "max_tool_calls": "it counts tools that a server calls",
            "client_metadata": "names a session to OpenAI",
            "user": "names a user to OpenAI",
            "service_tier": "there is one",
            "safety_identifier": "names a user to OpenAI",
            "prompt_cache_retention": "pages are kept as long as there is room",
            "prompt_cache_options": "pages are kept as long as there is room",
        },
    ),
)
