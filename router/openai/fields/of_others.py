"""Fields that clients of other servers send, and what becomes of each; a part of `table`.

A name that means exactly what a served field means is an alias of that. A sampler that is not here is passed over: the
answer is still one to the question. What would be another question, or another form of answer, is refused.
"""

from __future__ import annotations

from typing import Any

from router.openai.fields.generation_fields import SAMPLING
from router.openai.fields.of_apis import NO_TOOLS_OF_ITS_OWN, TEXT_ONLY
from router.openai.fields.states import (
    ALL,
    BOTH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    aliases,
    names_passed_over,
    no_effect,
    refused,
    served,
)

_FILTERS = [name for name in SAMPLING if not name.endswith("_penalty")]
_SAMPLER = f"the samplers here are {', '.join(_FILTERS)} and the three penalties"
_PENALTY = "repetition_penalty looks at all tokens of prompt and output"
_CONTEXT = "a prompt that does not fit the model's context is refused; truncate_prompt_tokens shortens it"
_ONE_MODEL = "this server has one model"
_NO_ADAPTERS = "this server has one model and no adapters"
_BANNED = "bad_words, logit_bias and allowed_token_ids say which tokens are chosen"
_REPORTED = "usage and logprobs tell what there is"
_SWITCH = ", if the model's chat template has a switch"
_THINKING = (
    *(
        "enable_thinking",
        "thinking",
        "think",
        "reasoning",
        "disable_reasoning",
        "thinking_budget",
        "reasoning_budget",
    ),
    *(
        "thinking_token_budget",
        "reasoning_effort",
        "include_reasoning",
        "separate_reasoning",
        "reasoning_format",
    ),
)
_OFF: tuple[Any, ...] = (0, 1, -1, False, "", [], {})  # values at which one or another sampler is off

OTHER_FIELDS = (
    *aliases(
        BOTH,
        {
            "max_new_tokens": "max_tokens",  # SGLang, Hugging Face
            "max_output_tokens": "max_tokens",  # OpenAI's Responses, Google
            "max_tokens_to_sample": "max_tokens",  # Anthropic's former API
            "n_predict": ("max_tokens", (-1,)),  # llama.cpp
            "num_predict": ("max_tokens", (-1, -2)),  # Ollama
            "min_new_tokens": "min_tokens",
            "num_return_sequences": "n",
            "temp": "temperature",  # KoboldCpp, SillyTavern
            "random_seed": "seed",  # Mistral
            "sampler_seed": ("seed", (-1,)),  # KoboldCpp
            "stop_sequences": ("stop", ([],)),  # Cohere, Anthropic
            "stop_sequence": ("stop", ([], "")),  # KoboldCpp
            "stopping_strings": ("stop", ([],)),  # text-generation-webui
            "grammar": ("guided_grammar", ("",)),  # llama.cpp
            "grammar_string": ("guided_grammar", ("",)),  # text-generation-webui
            "prompt_cache_isolation_key": "cache_salt",  # Fireworks
        },
    ),
    *aliases(
        RESPONSES,
        dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_output_tokens"),
    ),
    *served(
        "others",
        CHAT,
        {
            "enable_thinking": f"whether the model thinks{_SWITCH}",
            "thinking": f"{{type: enabled or disabled}}, or a boolean{_SWITCH}",
            "think": f"a boolean, or an effort{_SWITCH}",
            "reasoning": f"enabled, effort, exclude{_SWITCH}",
            "disable_reasoning": f"true turns thoughts off{_SWITCH}",
            "reasoning_format": "hidden leaves thoughts out, raw and none leave them in the content",
            "thinking_budget": "as thinking_token_budget",
            "reasoning_budget": "as thinking_token_budget",
        },
    ),
    *served(
        "others",
        (*ALL, *MESSAGES),
        {
            "deadline_seconds": "up to 86,400, until the first token: 429 at once where it cannot come in time, 503 "
            "where it did not",
        },
    ),
    *no_effect("others", COMPLETIONS, dict.fromkeys(_THINKING, "a completion has no chat template")),
    *refused(
        "others",
        BOTH,
        {
            "format": ("it is Ollama's; the name here is response_format", ("",)),
            "system": ("it is a message of role system here", ("", [])),
            "template": ("a template is a program: the model's own is used", ("",)),
            "do_sample": ("temperature 0 is greedy", (True,)),
            "num_beams": ("ask for n samples instead of beams", (1,)),
            "best_of_n": ("the name here is n", (1,)),
            "adapter_id": (_NO_ADAPTERS, ("",)),
            "lora_request": (_NO_ADAPTERS, ({},)),
            "images": (TEXT_ONLY, ([],)),
            "image_data": (TEXT_ONLY, ([],)),
        },
    ),
    # ---- samplers: llama.cpp, KoboldCpp, text-generation-webui, Aphrodite, Fireworks, and SillyTavern for all
    *names_passed_over(
        _SAMPLER,
        (
            *("typical_p", "typical", "top_a", "tfs", "tfs_z", "nsigma", "top_n_sigma", "min_keep", "skew"),
            *(
                "eta_cutoff",
                "epsilon_cutoff",
                "mirostat",
                "mirostat_mode",
                "dynatemp_range",
                "dynamic_temperature",
            ),
            *(
                "smoothing_factor",
                "dry_multiplier",
                "xtc_probability",
                "penalty_alpha",
                "no_repeat_ngram_size",
            ),
            *("temperature_last", "adaptive_target", "watermark", "watermarking", "speculative_ngram"),
        ),
        _OFF,
    ),
    *names_passed_over(
        "their order is fixed: penalties, temperature, top_k, top_p, min_p",
        ("samplers", "sampler_priority", "sampler_order"),
        ([],),
    ),
    *names_passed_over(
        _PENALTY,
        (
            *(
                "rep_pen",
                "rep_pen_range",
                "rep_pen_slope",
                "rep_pen_decay",
                "repeat_penalty",
                "repeat_last_n",
            ),
            *("repetition_penalty_range", "repetition_decay", "encoder_repetition_penalty", "penalty_range"),
            *("presence_pen", "freq_pen", "penalize_nl"),
        ),
        _OFF,
    ),
    *names_passed_over(
        _BANNED,
        (
            *("ban_eos_token", "ignore_eos_token", "banned_strings", "banned_tokens", "custom_token_bans"),
            *("token_bans", "add_bos_token", "sampling_mask", "exclude_top_choices"),
        ),
        (False, "", [], -1),
    ),
    *names_passed_over(
        "there is no guidance by a second prompt", ("guidance_scale", "cfg_scale", "negative_prompt"), (1, "")
    ),
    # ---- lengths
    *names_passed_over(
        _CONTEXT,
        (
            *(
                "num_ctx",
                "max_context_length",
                "truncation_length",
                "prompt_truncate_len",
                "max_prompt_tokens",
            ),
            *("context_length_exceeded_behavior", "transforms", "n_keep", "context"),
        ),
        ([], {}, "error"),
    ),
    *names_passed_over(
        "max_tokens and min_tokens count tokens of the answer", ("max_length", "min_length"), (0,)
    ),
    *names_passed_over("it is Ollama's; its entries are fields of their own here", ("options",), ({},)),
    # ---- thoughts
    *names_passed_over(
        "the model's chat template has its own switches for thoughts",
        ("thinking_config", "prompt_mode", "thinking_forced_open", "preserve_thinking", "clear_thinking"),
        ({}, "", False),
    ),
    # ---- what is reported beside the answer
    *names_passed_over(
        _REPORTED,
        (
            *("n_probs", "post_sampling_probs", "timings_per_token", "return_progress", "return_tokens"),
            *("perf_metrics_in_response", "raw_output", "response_fields", "echo_last", "return_images"),
            *("return_related_questions", "return_citations", "citation_options"),
        ),
        (0, False, [], ""),
    ),
    # ---- tools and stores of other servers
    *names_passed_over(
        NO_TOOLS_OF_ITS_OWN,
        (
            *(
                "plugins",
                "search_parameters",
                "search_settings",
                "search_options",
                "enable_search",
                "web_search",
            ),
            *(
                "compound_custom",
                "search_domain_filter",
                "search_recency_filter",
                "search_mode",
                "mcp_servers",
            ),
            *("enable_code_interpreter", "data_sources", "tool_stream", "executed_tools", "tool_resources"),
            *("exclude_domains", "include_domains", "connectors"),
        ),
        (False, [], {}, "", "off"),
    ),
    # ---- which model, and where
    *names_passed_over(
        _ONE_MODEL,
        (
            *(
                "models",
                "provider",
                "route",
                "fallbacks",
                "preset",
                "draft_model",
                "lora",
                "lora_adapters",
                "ttl",
            ),
            *("provider_preferences", "max_price", "speculation", "generation_config"),
        ),
        ([], {}, "", "fallback"),
    ),
    *names_passed_over(
        "it is not done here: say it in a message of role system",
        ("safe_prompt", "safety_model", "safety_settings", "guardrails", "compliance"),
        (False, [], {}, ""),
    ),
    *no_effect(
        "others",
        ALL,
        {
            "mirostat_tau": "it belongs to mirostat_mode",
            "mirostat_eta": "it belongs to mirostat_mode",
            "mirostat_target": "it belongs to mirostat_mode",
            "mirostat_lr": "it belongs to mirostat_mode",
            "dynatemp_low": "it belongs to dynamic_temperature",
            "dynatemp_high": "it belongs to dynamic_temperature",
            "dynatemp_exponent": "it belongs to dynatemp_range",
            "smoothing_curve": "it belongs to smoothing_factor",
            "dry_base": "it belongs to dry_multiplier",
            "dry_allowed_length": "it belongs to dry_multiplier",
            "dry_penalty_last_n": "it belongs to dry_multiplier",
            "dry_sequence_breakers": "it belongs to dry_multiplier",
            "dry_range": "it belongs to dry_multiplier",
            "xtc_threshold": "it belongs to xtc_probability",
            "adaptive_decay": "it belongs to adaptive_target",
            "keep_alive": "the model stays loaded",
            "cache_prompt": "prefixes are always cached",
            "cache_control": "prefixes are always cached",
            "id_slot": "requests have no slots of their own",
            "slot_id": "requests have no slots of their own",
            "n_cache_reuse": "prefixes are cached to the page",
            "usage": "an answer has its usage; of a stream, stream_options.include_usage",
            "incremental_output": "a stream's pieces are increments",
            "extra_body": "a Python client sends its entries, not itself",
            "speed": "there is one",
            "trim_stop": "a stop string is no part of the answer",
            "legacy_api": "names a kind of server to SillyTavern",
            "api_type": "names a kind of server to SillyTavern",
            "api_server": "names a kind of server to SillyTavern",
            "parse_tool_calls": "calls are parsed where tools are given",
            "drop_params": "it is LiteLLM's own",
            "safety_identifiers": "names users",
            "user_id": "names a user",
            "chat_id": "names a chat",
            "conversation_id": "names a chat",
            "thread_id": "names a chat",
            "session": "names a chat",
            "id": "names a request",
            "trace": "names a request",
            "trace_id": "names a request",
            "title": "names a chat",
            "tags": "they are for the client's own records",
        },
    ),
)
