"""Every field of the requests of OpenAI, vLLM and SGLang, and of a few other servers: what becomes of it here.

Data alone. `field_table` reads bodies by it, and `python -m tests.tidy.api_page` writes docs/api.md out of it. A field
that would change the output is served or refused, never ignored; see `field_states`.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.http.field_states import BOTH, CHAT, COMPLETIONS, Endpoint, KnownField, no_effect, refused, served
from router.http.known_responses_fields import RESPONSES_FIELDS

_LATER = "this version does not have it"
_TEXT_ONLY = "this server reads and writes text only"
_LOGPROBS = "logprobs, top_logprobs and prompt_logprobs tell what there is"
_NO_CODE = "code from a request is never run; use logit_bias, allowed_token_ids or bad_words"
_ROUTED = "the router moves KV pages between its workers by itself; leave it out"
_NOT_A_SAMPLER = "the samplers here are temperature, top_p, top_k, min_p and the three penalties"
_OWN_NAME = "the name here is {}"

_OPENAI = (
    *served(
        "OpenAI",
        BOTH,
        {
            "model": "required; /v1/models has the name",
            "stream": "",
            "stream_options": "include_usage",
            "max_tokens": "at least 1; a completion has 16 by default, a chat all that the context leaves",
            "temperature": "0 to 2; 0 is greedy",
            "top_p": "above 0, up to 1",
            "seed": "the same seed gives the same output, also over failures of workers",
            "frequency_penalty": "-2 to 2",
            "presence_penalty": "-2 to 2",
            "logit_bias": "up to 300 token ids, -100 to 100",
            "stop": "up to 16 strings of up to 1,024 characters",
            "prompt_cache_key": "requests of one key prefer one worker",
            "n": "at least 1; n times the prompts of a completion are bounded by `prompts_max`, 64 by default",
            "best_of": "what n is, or nothing: answers are not ranked here",
        },
    ),
    *served("OpenAI", CHAT, {"messages": "text; roles system, developer, user, assistant, tool"}),
    *served(
        "OpenAI",
        CHAT,
        {"response_format": "json_schema, json_object; a keyword that cannot be kept is refused"},
    ),
    *served("OpenAI", CHAT, {"logprobs": "of each token", "top_logprobs": "0 to 20; with logprobs"}),
    *served("OpenAI", COMPLETIONS, {"logprobs": "0 to 20: so many of the likeliest with each token"}),
    *served("OpenAI", CHAT, {"max_completion_tokens": "goes before max_tokens"}),
    *served(
        "OpenAI",
        CHAT,
        {
            "tools": "up to 128 functions, if the model's chat template shows them or a tool_call_parser is set",
            "tool_choice": "none, auto, required, or a tool by its name",
            "parallel_tool_calls": "false: one call at most, where calls are forced or strict",
            "functions": "the name of today is tools",
            "function_call": "the name of today is tool_choice",
        },
    ),
    *served("vLLM", CHAT, {"include_reasoning": "false leaves thoughts out"}),
    *served("SGLang", CHAT, {"separate_reasoning": "false leaves thoughts in the content"}),
    *served("OpenAI", CHAT, {"reasoning_effort": "goes to the template; none sets enable_thinking to false"}),
    *served(
        "OpenAI",
        COMPLETIONS,
        {"echo": "the prompt begins the answer; with logprobs it is not streamed; max_tokens may be 0"},
    ),
    *served("OpenAI", COMPLETIONS, {"prompt": "a string, token ids, or a list of either"}),
    *refused(
        "OpenAI",
        BOTH,
        {
            "moderation": "nothing is moderated here",
        },
    ),
    *refused(
        "OpenAI",
        COMPLETIONS,
        {
            "suffix": ("the model continues a prompt, it fills no gap", ("",)),
        },
    ),
    *refused(
        "OpenAI",
        CHAT,
        {
            "audio": _TEXT_ONLY,
            "modalities": (_TEXT_ONLY, (["text"],)),
            "prediction": "nothing is predicted from text that comes with a request",
            "web_search_options": "this server has no tools of its own",
        },
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
        },
    ),
)

_VLLM = (
    *served(
        "vLLM",
        BOTH,
        {
            "structured_outputs": "one of json, json_object, regex, choice, grammar, structural_tag",
            "guided_json": "the former name of structured_outputs.json",
            "guided_regex": "the former name of structured_outputs.regex",
            "guided_choice": "the former name of structured_outputs.choice",
            "guided_grammar": "the former name of structured_outputs.grammar",
        },
    ),
    *served("vLLM", COMPLETIONS, {"response_format": "as in chats"}),
    *served(
        "vLLM",
        BOTH,
        {
            "top_k": "0 or -1: all",
            "min_p": "0 to 1",
            "repetition_penalty": "0.01 to 10",
            "min_tokens": "no end before",
            "stop_token_ids": "up to 64",
            "ignore_eos": "",
            "allowed_token_ids": "up to 1,024; no other token is chosen",
            "bad_words": "up to 32; where a text begins, and behind a space",
            "cache_salt": "requests of different salts share no prefix cache",
            "truncate_prompt_tokens": "keeps so many tokens of a prompt of up to four contexts",
            "truncation_side": "left, unless set to right",
            "include_stop_str_in_output": "also for stop_token_ids",
            "skip_special_tokens": "true unless set",
            "return_token_ids": "each piece has token_ids",
            "prompt_logprobs": "0 to 20: so many of the likeliest with each token of the prompt; not streamed",
            "return_tokens_as_token_ids": "a token of logprobs is shown as token_id:17",
        },
    ),
    *served(
        "vLLM",
        CHAT,
        {
            "add_generation_prompt": "true unless set",
            "continue_final_message": "the answer goes on where the last message ends",
            "chat_template_kwargs": "variables of the template, but for the server's own",
            "documents": "for templates that read them",
        },
    ),
    *no_effect("vLLM", BOTH, {"spaces_between_special_tokens": "no spaces are put between them"}),
    *refused(
        "vLLM",
        BOTH,
        {
            "logprob_token_ids": (_LOGPROBS, ([],)),
            "return_prompt_text": (_LATER, (False,)),
            "use_beam_search": ("ask for n samples instead of beams", (False,)),
            "length_penalty": ("it belongs to beam search", (1, 1.0)),
            "early_stopping": ("it belongs to beam search", (False,)),
            "logits_processors": (_NO_CODE, ([],)),
            "prompt_embeds": "prompts are text or token ids",
            "guided_decoding_backend": "there is one: llguidance; leave it out",
            "guided_whitespace_pattern": "it is structured_outputs.whitespace_pattern",
            "thinking_token_budget": "max_tokens bounds thoughts and answer together",
            "kv_transfer_params": (_ROUTED, ({},)),
            "vllm_xargs": ("they belong to plugins of vLLM", ({},)),
            "priority": ("keys have priorities, requests do not", (0,)),
            "repetition_detection": _NOT_A_SAMPLER,
        },
    ),
    *refused(
        "vLLM",
        CHAT,
        {
            "add_special_tokens": ("a chat template writes its own control tokens", (False,)),
            "echo": ("an answer to messages has none of their text", (False,)),
            "chat_template": "a template is a program: the model's own is used",
            "media_io_kwargs": (_TEXT_ONLY, ({},)),
            "mm_processor_kwargs": (_TEXT_ONLY, ({},)),
        },
    ),
    *served("vLLM", COMPLETIONS, {"add_special_tokens": "true unless set; for prompts that are text"}),
    *no_effect(
        "vLLM",
        BOTH,
        {
            "request_id": "every answer has an id of its own; send X-Request-Id to find it in your logs",
        },
    ),
)

_SGLANG = (
    *served(
        "SGLang",
        BOTH,
        {
            "json_schema": "a JSON schema, as its text or as an object",
            "regex": "a regular expression that the whole answer matches",
            "ebnf": "a grammar in GBNF or Lark",
            "structural_tag": "structures of begin, schema and end, and their triggers",
        },
    ),
    *served("SGLang", BOTH, {"no_stop_trim": "the same as include_stop_str_in_output"}),
    *refused(
        "SGLang",
        BOTH,
        {
            "stop_regex": ("stop takes strings", ([], "")),
            "lora_path": "this server has one model and no adapters",
            "session_params": "prompt_cache_key keeps the requests of a session together",
            "custom_logit_processor": _NO_CODE,
            "custom_params": (_NO_CODE, ({},)),
            "input_ids": "a completion's prompt may be token ids",
            "input_embeds": "prompts are text or token ids",
            "return_logprob": (_LOGPROBS, (False,)),
            "logprob_start_len": (_LOGPROBS, (-1,)),
            "top_logprobs_num": (_LOGPROBS, (0,)),
            "token_ids_logprob": (_LOGPROBS, ([],)),
            "return_text_in_logprobs": (_LOGPROBS, (False,)),
            "return_hidden_states": ("they do not leave the workers", (False,)),
            "return_routed_experts": ("the model is dense", (False,)),
            "bootstrap_host": _ROUTED,
            "bootstrap_port": _ROUTED,
            "bootstrap_room": _ROUTED,
            "data_parallel_rank": _ROUTED,
            "disagg_prefill_dp_rank": _ROUTED,
            "routed_dp_rank": _ROUTED,
            "min_new_tokens": _OWN_NAME.format("min_tokens"),
            "max_new_tokens": _OWN_NAME.format("max_tokens"),
        },
    ),
    *no_effect(
        "SGLang",
        BOTH,
        {
            "rid": "every answer has an id of its own; send X-Request-Id to find it in your logs",
            "session_id": "prompt_cache_key keeps the requests of a session together",
            "extra_key": "cache_salt keeps prefix caches apart",
            "stream_reasoning": "thoughts come in their own field as the model writes them",
            "return_cached_tokens_details": "usage tells them always",
            "log_metrics": "metrics are always counted",
        },
    ),
)

_OTHERS = (
    *refused(
        "others",
        BOTH,
        {
            "grammar": "the name here is structured_outputs.grammar",
            "format": "it is Ollama's; the name here is response_format",
            "options": "it is Ollama's; its entries are fields of their own here",
            "num_predict": _OWN_NAME.format("max_tokens"),
            "n_predict": _OWN_NAME.format("max_tokens"),
            "max_output_tokens": _OWN_NAME.format("max_tokens"),
            "max_tokens_to_sample": _OWN_NAME.format("max_tokens"),
            "max_length": _OWN_NAME.format("max_tokens"),
            "num_ctx": "the context is the model's",
            "repeat_penalty": _OWN_NAME.format("repetition_penalty"),
            "repeat_last_n": "penalties look at all tokens",
            "stop_sequences": _OWN_NAME.format("stop"),
            "stopping_strings": _OWN_NAME.format("stop"),
            "system": "it is a message of role system here",
            "do_sample": ("temperature 0 is greedy", (True,)),
            "num_beams": ("ask for n samples instead of beams", (1,)),
            "num_return_sequences": (_OWN_NAME.format("n"), (1,)),
            "best_of_n": _OWN_NAME.format("n"),
            "top_a": _NOT_A_SAMPLER,
            "typical_p": (_NOT_A_SAMPLER, (1, 1.0)),
            "tfs_z": (_NOT_A_SAMPLER, (1, 1.0)),
            "eta_cutoff": _NOT_A_SAMPLER,
            "epsilon_cutoff": _NOT_A_SAMPLER,
            "mirostat": (_NOT_A_SAMPLER, (0,)),
            "mirostat_mode": (_NOT_A_SAMPLER, (0,)),
            "mirostat_tau": _NOT_A_SAMPLER,
            "mirostat_eta": _NOT_A_SAMPLER,
            "dynatemp_range": (_NOT_A_SAMPLER, (0,)),
            "dynatemp_exponent": _NOT_A_SAMPLER,
            "smoothing_factor": (_NOT_A_SAMPLER, (0,)),
            "smoothing_curve": _NOT_A_SAMPLER,
            "dry_multiplier": (_NOT_A_SAMPLER, (0,)),
            "dry_base": _NOT_A_SAMPLER,
            "dry_allowed_length": _NOT_A_SAMPLER,
            "dry_sequence_breakers": _NOT_A_SAMPLER,
            "xtc_probability": (_NOT_A_SAMPLER, (0,)),
            "xtc_threshold": _NOT_A_SAMPLER,
            "top_n_sigma": _NOT_A_SAMPLER,
            "samplers": "their order is fixed: penalties, temperature, top_k, top_p, min_p",
            "penalty_alpha": _NOT_A_SAMPLER,
            "no_repeat_ngram_size": (_NOT_A_SAMPLER, (0,)),
            "encoder_repetition_penalty": _NOT_A_SAMPLER,
            "min_length": _OWN_NAME.format("min_tokens"),
            "watermark": ("nothing is marked", (False,)),
            "watermarking": ("nothing is marked", (False,)),
            "adapter_id": "this server has one model and no adapters",
            "lora_request": "this server has one model and no adapters",
            "negative_prompt": "there is no guidance by a second prompt",
            "guidance_scale": ("there is no guidance by a second prompt", (1, 1.0)),
            "images": _TEXT_ONLY,
            "thinking": "chat templates have their own switches for thoughts",
            "enable_thinking": "chat templates have their own switches for thoughts",
            "safe_prompt": ("say it in a message of role system", (False,)),
            "random_seed": _OWN_NAME.format("seed"),
            "plugins": "this server has no tools of its own",
            "transforms": "prompts are not shortened",
            "models": "this server has one model",
            "provider": "requests go to no other server",
            "route": "requests go to no other server",
        },
    ),
    *no_effect(
        "others",
        BOTH,
        {
            "keep_alive": "the model stays loaded",
            "cache_prompt": "prefixes are always cached",
            "extra_body": "a Python client sends its entries, not itself",
        },
    ),
)

KNOWN_FIELDS: tuple[KnownField, ...] = (*_OPENAI, *RESPONSES_FIELDS, *_VLLM, *_SGLANG, *_OTHERS)


def fields_of(endpoint: Endpoint, known: Iterable[KnownField] = KNOWN_FIELDS) -> dict[str, KnownField]:
    """What the table says of each field of an endpoint, by name."""
    return {field.name: field for field in known if endpoint in field.endpoints}
