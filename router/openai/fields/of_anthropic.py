"""Every field of Anthropic's /v1/messages, and what becomes of it; a part of `known`."""

from __future__ import annotations

from router.openai.fields.of_openai import NO_TOOLS_OF_ITS_OWN
from router.openai.fields.states import MESSAGES, aliases, no_effect, passed_over, refused, served

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
            "top_p": "above 0, up to 1",
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
        {
            "seed": "as in a chat",
            "cache_salt": "requests of different salts share no prefix cache",
        },
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
