"""Every field of the APIs that are served, OpenAI's and Anthropic's, and what becomes of it; a part of `table`."""

from __future__ import annotations

from router.openai.fields.states import (
    BOTH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    aliases,
    no_effect,
    passed_over,
    refused,
    served,
)

TEXT_ONLY = "this server reads and writes text only"
NO_TOOLS_OF_ITS_OWN = "this server has no tools of its own"

OPENAI_FIELDS = (
    *served(
        "OpenAI",
        BOTH,
        {
            "model": "may be left out: there is one; /v1/models has its names",
            "stream": "",
            "stream_options": "include_usage; with it, as in vLLM, continuous_usage_stats: each chunk has the "
            "usage of its choice so far",
            "max_tokens": "at least 1; a completion has 16 by default, a chat all that the context leaves",
            "temperature": "0 to 1,000; 0 is greedy",
            "top_p": "0 to 1; 0 is greedy",
            "seed": "the same seed gives the same output, also over failures of workers; -1: any, as without it",
            "frequency_penalty": "-2 to 2",
            "presence_penalty": "-2 to 2",
            "logit_bias": "up to 300 token ids, -100 to 100",
            "stop": "up to 16 strings of up to 1,024 characters; not looked for in thoughts and calls of tools",
            "prompt_cache_key": "requests of one key prefer one worker",
            "n": "at least 1; n times the prompts of a request is at most `prompts_max`, 128 by default",
            "best_of": "what n is, or nothing: answers are not ranked here",
        },
    ),
    *served("OpenAI", CHAT, {"messages": "text; roles system, developer, user, assistant, tool"}),
    *served(
        "OpenAI",
        CHAT,
        {
            "response_format": "json_schema, json_object, which may have a schema; what cannot be kept is refused if "
            "strict, else named"
        },
    ),
    *served("OpenAI", CHAT, {"logprobs": "of each token", "top_logprobs": "0 to 20; with logprobs"}),
    *served("OpenAI", COMPLETIONS, {"logprobs": "0 to 20: so many of the likeliest with each token"}),
    *served("OpenAI", CHAT, {"max_completion_tokens": "takes precedence over max_tokens"}),
    *served(
        "OpenAI",
        CHAT,
        {
            "tools": "up to 128 functions and custom tools, if the model's template shows them or a tool_call_parser is"
            " set; a server's own, as web_search, are left out and named",
            "tool_choice": "none, auto, required, a tool by its name, or allowed_tools",
            "parallel_tool_calls": "false: one call at most, where calls are forced or strict",
            "functions": "the name of today is tools; the answer has the first call, as function_call",
            "function_call": "the name of today is tool_choice",
        },
    ),
    *served("OpenAI", CHAT, {"reasoning_effort": "goes to the template; none turns thoughts off"}),
    *served(
        "OpenAI",
        COMPLETIONS,
        {"echo": "the prompt begins the answer; with logprobs it is not streamed; max_tokens may be 0"},
    ),
    *served("OpenAI", COMPLETIONS, {"prompt": "a string, token ids, or a list of either"}),
    *refused("OpenAI", COMPLETIONS, {"suffix": ("the model continues a prompt, it fills no gap", ("",))}),
    *refused("OpenAI", CHAT, {"audio": TEXT_ONLY, "modalities": (TEXT_ONLY, (["text"],))}),
    *passed_over(
        "OpenAI", BOTH, {"moderation": "nothing is moderated here", "web_search_options": NO_TOOLS_OF_ITS_OWN}
    ),
    *no_effect(
        "OpenAI",
        BOTH,
        {
            "user": "names a user to OpenAI",
            "metadata": "nothing is stored",
            "store": "nothing is stored",
            "service_tier": "there is one",
            "safety_identifier": "names a user to OpenAI",
            "prompt_cache_retention": "pages are kept as long as there is room",
            "prompt_cache_options": "pages are kept as long as there is room",
            "verbosity": "a hint that models may ignore",
            "prediction": "it makes OpenAI faster; the answer is the same",
        },
    ),
)


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
            "top_p": "0 to 1; 0 is greedy",
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
    *served("others", RESPONSES, {"enable_thinking": "as in a chat", "thinking": "as in a chat"}),
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


_OF_THE_ACCOUNT = "it belongs to accounts at Anthropic"

ANTHROPIC_FIELDS = (
    *served(
        "Anthropic",
        MESSAGES,
        {
            "model": "may be left out: there is one; /v1/models has its names",
            "messages": "text, tool_use, tool_result, thinking, documents that are text; images are refused",
            "max_tokens": "required; what the context leaves where that is less (model_context_window_exceeded)",
            "system": "a string, or blocks of text",
            "stream": "typed events",
            "temperature": "0 to 1,000; 0 is greedy",
            "top_p": "0 to 1; 0 is greedy",
            "top_k": "0 or -1: all",
            "stop_sequences": "up to 16 strings of up to 1,024 characters; stop_sequence tells which was found",
            "tools": "with input_schema; bash, text editor and memory with the schemas that Anthropic documents; "
            "tools that Anthropic runs are left out and named in x-segue-ignored",
            "tool_choice": "auto, any, tool or none; disable_parallel_tool_use",
            "thinking": "enabled or adaptive: the template's switch for thoughts; else there are no thoughts in the "
            "answer. display: omitted leaves their text out; budget_tokens is passed over",
            "output_config": "effort goes to the template; format: a JSON schema",
            "output_format": "the former name of output_config.format",
        },
    ),
    *served(
        "vLLM",
        MESSAGES,
        {"seed": "as in a chat", "cache_salt": "requests of different salts share no prefix cache"},
    ),
    *aliases(MESSAGES, {"stop": ("stop_sequences", ([], "")), "stop_sequence": ("stop_sequences", ([], ""))}),
    *refused(
        "others",
        MESSAGES,
        {
            "response_format": ("the name here is output_config.format", ({"type": "text"},)),
            "reasoning_effort": ("the name here is output_config.effort", ("none",)),
            "n": ("a message is one answer: /v1/chat/completions has n", (1,)),
        },
    ),
    *passed_over(
        "Anthropic",
        MESSAGES,
        {
            "mcp_servers": (NO_TOOLS_OF_ITS_OWN, ([],)),
            "context_management": ("a prompt is not shortened", ({}, {"edits": []})),
            "compaction": ("a prompt is not shortened", ({},)),
            "thread": "nothing is stored",
            "fallbacks": ("this server has one model", ([],)),
        },
    ),
    *no_effect(
        "Anthropic",
        MESSAGES,
        {
            "metadata": "user_id names a user to Anthropic",
            "cache_control": "prefixes are always cached; so it is in blocks and tools",
            "service_tier": "there is one",
            "container": NO_TOOLS_OF_ITS_OWN,
            "fallback_credit_token": _OF_THE_ACCOUNT,
            "billing_policy": _OF_THE_ACCOUNT,
            "user_profile_id": _OF_THE_ACCOUNT,
            "workspace_id": _OF_THE_ACCOUNT,
            "inference_geo": "the model computes where it is",
            "speed": "there is one",
            "diagnostics": "the answer's request-id leads to what became of a request",
            "betas": "it is the header anthropic-beta, which is passed over",
        },
    ),
)
