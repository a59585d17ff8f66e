"""The fields that vLLM and SGLang add to OpenAI's, and what becomes of each; a part of `table`."""

from __future__ import annotations

from router.openai.fields.generation_fields import SAMPLING_OF_ENGINES
from router.openai.fields.of_apis import TEXT_ONLY
from router.openai.fields.states import (
    ALL,
    BOTH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    no_effect,
    passed_over,
    refused,
    served,
)

_LATER = "this version does not have it"
_LOGPROBS = "logprobs, top_logprobs and prompt_logprobs tell what there is"
_NO_CODE = "code from a request is never run; use logit_bias, allowed_token_ids or bad_words"
_ROUTED = "the router moves KV pages between its workers by itself"
_OF_BEAMS = "it belongs to beam search"

VLLM_FIELDS = (
    *served("vLLM", (*ALL, *MESSAGES), SAMPLING_OF_ENGINES),
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
            "min_tokens": "no end before, by a stop string neither",
            "stop_token_ids": "up to 64",
            "ignore_eos": "",
            "allowed_token_ids": "up to 1,024; no other token is chosen",
            "bad_words": "up to 32; where a text begins, and behind a space",
            "cache_salt": "requests of different salts share no prefix cache",
            "truncate_prompt_tokens": "keeps so many tokens of a prompt of up to four contexts",
            "truncation_side": "left, unless set to right",
            "include_stop_str_in_output": "also for stop_token_ids",
            "skip_special_tokens": "true unless set; false leaves out the one that ends an answer alone",
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
            "include_reasoning": "false leaves thoughts out",
            "thinking_token_budget": "0 turns thoughts off; no other budget is held, and the header names it",
        },
    ),
    *served("vLLM", COMPLETIONS, {"add_special_tokens": "true unless set; for prompts that are text"}),
    *refused(
        "vLLM",
        BOTH,
        {
            "logprob_token_ids": (_LOGPROBS, ([],)),
            "return_prompt_text": (_LATER, (False,)),
            "use_beam_search": ("ask for n samples instead of beams", (False,)),
            "logits_processors": (_NO_CODE, ([],)),
            "prompt_embeds": "prompts are text or token ids",
            "guided_whitespace_pattern": "it is structured_outputs.whitespace_pattern",
        },
    ),
    *refused(
        "vLLM",
        CHAT,
        {
            "echo": ("an answer to messages has none of their text", (False,)),
            "chat_template": ("a template is a program: the model's own is used", ("",)),
        },
    ),
    *passed_over(
        "vLLM", CHAT, {"add_special_tokens": ("a chat template writes its own control tokens", (False,))}
    ),
    *passed_over(
        "vLLM",
        BOTH,
        {
            "kv_transfer_params": (_ROUTED, ({},)),
            "vllm_xargs": ("they belong to plugins of vLLM", ({},)),
            "priority": ("keys have priorities, requests do not", (0,)),
            "repetition_detection": "an answer ends at max_tokens at the latest",
        },
    ),
    *no_effect(
        "vLLM",
        BOTH,
        {
            "spaces_between_special_tokens": "no spaces are put between them",
            "length_penalty": _OF_BEAMS,
            "early_stopping": _OF_BEAMS,
            "guided_decoding_backend": "there is one: llguidance",
            "media_io_kwargs": TEXT_ONLY,
            "mm_processor_kwargs": TEXT_ONLY,
            "request_id": "every answer has an id of its own; send X-Request-Id to find it in your logs",
        },
    ),
)

SGLANG_FIELDS = (
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
    *served("SGLang", CHAT, {"separate_reasoning": "false leaves thoughts in the content"}),
    *refused(
        "SGLang",
        BOTH,
        {
            "stop_regex": ("stop takes strings", ([], "")),
            "lora_path": ("this server has one model and no adapters", ("",)),
            "custom_logit_processor": (_NO_CODE, ("",)),
            "input_ids": "a completion's prompt may be token ids",
            "input_embeds": "prompts are text or token ids",
            "return_logprob": (_LOGPROBS, (False,)),
            "token_ids_logprob": (_LOGPROBS, ([],)),
            "return_hidden_states": ("they do not leave the workers", (False,)),
            "return_routed_experts": ("they do not leave the workers", (False,)),
        },
    ),
    *passed_over(
        "SGLang",
        BOTH,
        {
            "session_params": "prompt_cache_key keeps the requests of a session together",
            "bootstrap_host": _ROUTED,
            "bootstrap_port": _ROUTED,
            "bootstrap_room": _ROUTED,
            "data_parallel_rank": _ROUTED,
            "disagg_prefill_dp_rank": _ROUTED,
            "routed_dp_rank": _ROUTED,
            "return_prompt_token_ids": ("return_token_ids tells those of the answer", (False,)),
            "return_meta_info": ("usage and finish_reason tell what there is", (False,)),
        },
    ),
    *no_effect(
        "SGLang",
        BOTH,
        {
            "rid": "every answer has an id of its own; send X-Request-Id to find it in your logs",
            "session_id": "prompt_cache_key keeps the requests of a session together",
            "extra_key": "cache_salt keeps prefix caches apart",
            "custom_params": "they belong to custom_logit_processor",
            "logprob_start_len": "it belongs to return_logprob",
            "top_logprobs_num": "it belongs to return_logprob",
            "return_text_in_logprobs": "it belongs to return_logprob",
            "stream_reasoning": "thoughts come in their own field as the model writes them",
            "return_cached_tokens_details": "usage tells them always",
            "log_metrics": "metrics are always counted",
            "custom_labels": "metrics have no labels of clients",
        },
    ),
)
