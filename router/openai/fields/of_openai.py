"""Every field of OpenAI's chat completions and completions, and what becomes of it; a part of `known`."""

from __future__ import annotations

from router.openai.fields.states import BOTH, CHAT, COMPLETIONS, no_effect, passed_over, refused, served

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
            "top_p": "above 0, up to 1",
            "seed": "the same seed gives the same output, also over failures of workers",
            "frequency_penalty": "-2 to 2",
            "presence_penalty": "-2 to 2",
            "logit_bias": "up to 300 token ids, -100 to 100",
            "stop": "up to 16 strings of up to 1,024 characters",
            "prompt_cache_key": "requests of one key prefer one worker",
            "n": "at least 1; n times the prompts of a request is at most `prompts_max`, 128 by default",
            "best_of": "what n is, or nothing: answers are not ranked here",
        },
    ),
    *served("OpenAI", CHAT, {"messages": "text; roles system, developer, user, assistant, tool"}),
    *served(
        "OpenAI",
        CHAT,
        {"response_format": "json_schema, json_object; what cannot be kept is refused if strict, else named"},
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
            "functions": "the name of today is tools",
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
        "OpenAI",
        BOTH,
        {"moderation": "nothing is moderated here", "web_search_options": NO_TOOLS_OF_ITS_OWN},
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
