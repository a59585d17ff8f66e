"""Every bound on what clients may take from a router. Tests of `tests/abuse` go there with 1 GiB of address space."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound
from tests.abuse.bounds.connections import CONNECTION_BOUNDS

RESOURCES, SLOW, STRANGERS = (
    f"tests/abuse/test_{name}.py" for name in ("resources", "slow_clients", "strangers")
)
FULL = "tests/abuse/test_full_bounds.py"
HEAD = f"{RESOURCES}::test_a_head_of_any_size_costs_little"
BODY = f"{RESOURCES}::test_a_body_of_any_content_costs_a_bounded_amount"
ENDED = f"{SLOW}::test_a_slow_client_is_ended"
HTTP = "tests/abuse/test_http.py::test_a_connection_is_answered_or_closed"
PARSER, FIELDS = "router.listener.request_parser", "router.openai.generation_request"
TABLE = "router.openai.fields.table"
UNIT = "tests/unit/router"
TOOL_NAMES = "tests/unit/router/openai/tools/test_tools_over_http.py::test_bad_tools_are_refused_by_name"
JSON = "tests/abuse/test_bodies.py::test_a_body_is_served_or_refused_without_an_echo"

ROUTER_BOUNDS = (
    *CONNECTION_BOUNDS,
    *(
        Bound(
            name,
            "400",
            fixed,
            f"{UNIT}/openai/tools/test_structured_output.py::test_each_bound_of_a_field_is_a_400[{case}]",
            place="router.openai.tools.structured_output",
        )
        for name, fixed, case in (
            ("REGEX_FIELD_CHARACTERS_MAX", "8 KiB", "regex"),
            ("CHOICES_MAX", "2,000 choices", "choices"),
            ("GBNF_CHARACTERS_MAX", "0.1 s of a converter in Python", "gbnf"),
        )
    ),
    Bound("HEAD_BYTES_MAX", "431", "64 KiB a connection", f"{HEAD}[96 MB in one header]", place=PARSER),
    Bound("HEADERS_MAX", "431", "17 KiB a connection", f"{HEAD}[64 MB of headers]", place=PARSER),
    Bound("URL_BYTES_MAX", "414", "8 KiB a connection", f"{HEAD}[96 MB in the URL]", place=PARSER),
    Bound(
        "FRAMING_BYTES_MAX",
        "400",
        "64 KiB a connection",
        f"{HEAD}[64 MB in a chunk's extension]",
        place=PARSER,
    ),
    Bound(
        "AHEAD_BYTES_MAX",
        "reading pauses",
        "16 KiB a connection",
        f"{RESOURCES}::test_requests_without_end_in_the_pipe_are_not_read_ahead",
        place="router.listener.connection",
    ),
    Bound("head_seconds_max", "408", "10 s", f"{ENDED}[a head of a byte a second]"),
    Bound("idle_seconds_max", "the connection closes", "75 s", f"{ENDED}[silence after an answer]"),
    Bound("write_seconds_max", "the connection is cut", "30 s", f"{ENDED}[answers that nobody reads]"),
    Bound(
        "stream_backlog_bytes",
        "the connection is cut",
        "16 MiB a stream, and among the 64 MiB of all unread answers",
        f"{UNIT}/openai/test_api_trouble.py::test_a_client_that_does_not_read_its_stream_is_cut",
    ),
    Bound(
        "AHEAD_SECONDS_MAX",
        "the connection is cut, and its request cancelled",
        "a hang-up goes unnoticed for 1 s",
        f"{UNIT}/listener/test_client_connections.py"
        "::test_more_sent_ahead_than_is_read_ends_the_connection_after_a_moment",
        place="router.listener.connection",
    ),
    Bound(
        "LINGER_BYTES_MAX",
        "the connection is cut",
        "64 MiB are read and dropped, in 2 s at most",
        f"{HEAD}[96 MB in one header]",
        place="router.listener.connection",
    ),
    Bound(
        "REFUSED_OPEN_MAX",
        "further ones are closed without an answer",
        "128 refused connections",
        f"{FULL}::test_every_connection_that_is_allowed_fits_into_memory",
        place="router.listener.connections",
    ),
    # bodies
    Bound("max_body_bytes", "413", "4 MiB a body", f"{JSON}[a byte more than a body may have]"),
    Bound(
        "router_bytes_max",
        "429",
        "256 MiB from the first byte until a request is tokenized; half of it for one client",
        f"{FULL}::test_bodies_that_never_end_fit_into_memory",
    ),
    Bound(
        "template_seconds_max",
        "400",
        "5 s of one tokenizer thread",
        f"{UNIT}/text/test_time_limit.py::test_work_that_does_not_end_is_ended_and_its_thread_goes_on",
    ),
    Bound("body_seconds_max", "408", "30 s", f"{ENDED}[a body of a byte a second]"),
    Bound("prompts_max", "400", "128 requests of one HTTP request", f"{JSON}[129 prompts]"),
    Bound(
        "TOOLS_MAX",
        "400",
        "128 tools of one HTTP request",
        f"{JSON}[129 tools]",
        place="router.openai.tools.declared",
    ),
    *(
        Bound(
            name,
            "400",
            f"{chars} characters a tool",
            f"{TOOL_NAMES}[{case}]",
            place="router.openai.tools.declared",
        )
        for name, chars, case in (
            ("NAME_CHARS_MAX", 128, "a name of 129 characters"),
            ("NAMESPACE_CHARS_MAX", 64, "a namespace of 65 characters"),
        )
    ),
    Bound(
        "tokenizing_max",
        "429",
        "256 bodies as they came, within router_bytes_max",
        f"{RESOURCES}::test_eight_large_bodies_behind_three_busy_ones_cost_a_bounded_amount",
    ),
    Bound("STOP_STRINGS_MAX", "400", "16 KiB a request", f"{JSON}[1,000 stop strings]", place=FIELDS),
    Bound(
        "STOP_CHARS_MAX",
        "400",
        "no more time a token than without stop strings, times two",
        f"{RESOURCES}::test_stop_strings_that_nearly_match_cost_the_router_little",
        place=FIELDS,
    ),
    Bound(
        "DEADLINE_SECONDS_MAX",
        "400",
        "no longer than waiting_seconds_max",
        f"{UNIT}/openai/test_api_bad_input.py::test_bad_input_gets_a_clear_error_that_names_the_field"
        "[a deadline in a thousand years]",
        place=FIELDS,
    ),
    Bound(
        "SMALL_FIELDS_BYTES_MAX",
        "400",
        "512 KiB decoded, of one of two tokenizer threads",
        f"{UNIT}/openai/fields/test_field_table.py::test_small_fields_are_bounded_together",
        place=TABLE,
    ),
    Bound(
        "NEUTRAL_BYTES_MAX",
        "400",
        "64 bytes decoded",
        f"{UNIT}/openai/fields/test_field_table.py::test_a_long_value_of_an_unsupported_field_is_not_decoded",
        place=TABLE,
    ),
    Bound(
        "NAMES_MAX",
        "unknown names are passed over unread",
        "16,384 names of one of two tokenizer threads",
        f"{UNIT}/openai/fields/test_field_table.py::test_more_names_than_any_client_sends_are_not_looked_at",
        place=TABLE,
    ),
    Bound(
        "NAMES_MAX",
        "further unknown names are not compared with known ones",
        "64 names, compared in 20 ms on one of two tokenizer threads",
        f"{UNIT}/openai/fields/test_ignored_fields.py::test_comparing_names_is_bounded_whatever_they_are",
        place="router.openai.fields.spelling",
    ),
    Bound(
        "OWN_NAMES_MAX",
        "further names are counted",
        "3 KB of an answer's head, with the client's names",
        f"{UNIT}/openai/fields/test_ignored_fields.py::test_the_header_is_bounded_whatever_a_request_asks_for",
        place="router.openai.fields.ignored",
    ),
    Bound(
        "CLIENT_NAMES_MAX",
        "further names are counted",
        "3 KB of an answer's head, with the table's names",
        f"{UNIT}/openai/fields/test_ignored_fields.py::test_no_name_can_end_the_line_or_make_the_head_large",
        place="router.openai.fields.ignored",
    ),
    Bound(
        "TRUNCATED_CONTEXTS_MAX",
        "400",
        "four contexts of one of two tokenizer threads",
        f"{UNIT}/openai/fields/test_text_fields.py::test_a_prompt_beyond_the_context_may_be_truncated",
        place="router.openai.prompts.prompts",
    ),
    Bound(
        "BAD_WORDS_MAX",
        "400",
        "32 words of 256 characters tokenized twice, of one of two tokenizer threads",
        f"{UNIT}/openai/tools/test_bad_words.py::test_words_that_are_too_many_or_too_long_are_refused",
        place="router.openai.tools.structured_output",
    ),
    Bound(
        "BAD_WORD_CHARS_MAX",
        "400",
        "see BAD_WORDS_MAX",
        f"{UNIT}/openai/tools/test_bad_words.py::test_words_that_are_too_many_or_too_long_are_refused",
        place="router.openai.tools.structured_output",
    ),
    Bound(
        "OBJECTS_PER_TOKEN_MAX",
        "400",
        "four items for each token of the context, of one of two tokenizer threads",
        f"{UNIT}/openai/responses/test_responses.py::test_more_items_than_the_context_could_hold_are_not_read",
        place="router.openai.responses.fields",
    ),
    Bound(
        "PENDING_TOKENS_MAX",
        "the text goes out as it is",
        "8 tokens a stream",
        f"{UNIT}/text/test_detokenizer.py::test_broken_bytes_without_end_neither_wait_nor_pile_up",
        place="router.text.detokenizer",
    ),
    # requests
    Bound(
        "max_queued_requests",
        "429",
        "1,024 prompts of one context each: 64 MiB at 8,192 tokens",
        f"{FULL}::test_a_full_queue_of_the_longest_prompts_fits_into_memory",
    ),
    Bound(
        "ready_max",
        "requests wait in the queue",
        "pages of prefill workers only",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_prefill_stops_while_ready_requests_tie_up_pages",
    ),
    Bound(
        "ready_seconds",
        "requests wait in the queue",
        "seconds of a stream's pause after its first token",
        f"{UNIT}/core/queueing/test_backpressure.py::test_no_more_is_computed_than_decode_takes_in_ready_seconds",
    ),
    Bound(
        "WAIT_FRACTION",
        "429 with Retry-After",
        "seconds of a wait that would end in a 503",
        f"{UNIT}/core/queueing/test_backpressure.py::test_a_new_request_that_would_wait_too_long_is_refused_at_once_with_429",
        place="router.core.queueing.admission",
    ),
    Bound(
        "stall_seconds",
        "the request is cancelled at its worker, and tried again",
        "seconds of a request that its worker has forgotten",
        f"{UNIT}/core/worker_events/test_dispatch_losses.py::test_a_request_that_its_prefill_worker_has_forgotten_goes_elsewhere",
    ),
    Bound(
        "silent_seconds",
        "all requests of a worker that reports none are cancelled there, and tried again",
        "a worker that takes requests and answers none, while others answer three",
        f"{UNIT}/core/worker_events/test_silent_workers.py::test_a_worker_that_answers_nothing_while_others_do_loses_all_that_it_has",
    ),
    Bound(
        "ANSWERS_MAX",
        "the oldest answer is forgotten",
        "a thousand answers",
        f"{UNIT}/core/worker_events/test_silent_workers.py::test_what_is_remembered_of_answers_is_bounded",
        place="router.core.worker_events.silent_workers",
    ),
    Bound(
        "REQUESTS_MAX",
        "the worker is compared by the first of them",
        "a worker that has more requests than that",
        f"{UNIT}/core/worker_events/test_silent_workers.py::test_a_worker_is_compared_by_few_requests",
        place="router.core.worker_events.silent_workers",
    ),
    Bound(
        "FETCHES_MAX",
        "the prompt is computed anew, elsewhere",
        "two fetches that fail",
        f"{UNIT}/core/fleet/test_unreachable_pairs.py::test_the_same_pages_are_fetched_by_two_workers_at_most",
        place="router.core.worker_events.worker_replies",
    ),
    Bound(
        "RATES_MAX",
        "the oldest rate is forgotten",
        "64 rates of two hundred marks",
        f"{UNIT}/core/queueing/test_backpressure.py::test_the_rates_that_are_kept_are_bounded",
        place="router.core.queueing.backpressure",
    ),
    Bound(
        "REFUSED_MAX",
        "the tenant that was refused longest ago is forgotten, and its prompts are sent once more",
        "16 names of tenants for each worker",
        f"{UNIT}/core/queueing/test_pages_for_prompts.py::test_of_tenants_that_a_worker_refused_the_last_are_remembered",
        place="router.core.fleet.refused_tenants",
    ),
    Bound(
        "MODELS_MAX",
        "what was found of the model asked for longest ago is forgotten",
        "128 pairs of shares",
        f"{UNIT}/core/fleet/test_found.py::test_what_was_found_is_forgotten_where_models_come_and_go",
        place="router.core.fleet.prefix_index",
    ),
    Bound(
        "GROUPS_MAX",
        "the one that was used longest ago is forgotten",
        "64 sums",
        f"{UNIT}/core/fleet/test_prompt_seconds.py::test_models_and_groups_that_come_and_go_are_forgotten",
        place="router.core.fleet.prompt_seconds",
    ),
    Bound(
        "RATES_MAX",
        "those of the model and role that told one longest ago are forgotten",
        "128 models and roles",
        f"{UNIT}/core/fleet/test_prompt_seconds.py::test_models_and_groups_that_come_and_go_are_forgotten",
        place="router.core.fleet.told_rates",
    ),
    Bound(
        "TELLERS_MAX",
        "the rate of the worker that told another one longest ago is forgotten",
        "16 rates of each model and role",
        f"{UNIT}/core/fleet/test_prompt_seconds.py::test_the_rates_that_are_compared_are_those_of_the_last_workers",
        place="router.core.fleet.told_rates",
    ),
    Bound(
        "losses_max",
        "500",
        "nine workers before it comes 32 tokens further: five losses of two that die together, and the last ends it",
        f"{UNIT}/core/worker_events/test_dispatch_losses.py::test_a_request_that_kills_at_once_whatever_takes_it_cannot_kill_all",
    ),
    Bound(
        "waiting_seconds_max",
        "503",
        "30 s",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_a_request_no_worker_takes_in_time_is_a_503",
    ),
    Bound(
        "worker_return_seconds",
        "503",
        "60 s in which no worker could continue a stream that has begun",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_a_ready_request_that_no_worker_could_continue_ends_with_503_and_its_lease_too",
    ),
    Bound(
        "request_seconds_max",
        "504",
        "no limit until it is set",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_a_request_past_its_time_limit_is_a_504_and_cancelled",
    ),
    Bound(
        "tenant_waiting_max",
        "429",
        "its share of max_queued_requests",
        f"{UNIT}/core/requests/test_tenants.py::test_no_tenant_may_take_the_last_share_of_the_queue",
    ),
    Bound(
        "tenant_running_max",
        "requests wait in the queue",
        "no limit until it is set",
        f"{UNIT}/core/requests/test_tenants.py::test_requests_beyond_a_tenants_running_bound_wait_and_hold_nobody_up",
    ),
    Bound(
        "tenant_share_max",
        "requests wait, or 429",
        "another client waits 2 s for its first tokens",
        "tests/abuse/test_overload.py"
        "::test_four_tokens_come_within_two_seconds_while_another_client_floods[whole answers]",
    ),
    Bound(
        "backfill_max",
        "room is kept for the request that others went past",
        "32 smaller requests go first",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_room_is_kept_for_a_large_request_once_many_have_gone_past_it",
    ),
    Bound(
        "CHOOSING_MAX",
        "its others are tried in the next pass",
        "8 looks at all decode workers, of each tenant and pass",
        f"{UNIT}/core/queueing/test_better_workers.py"
        "::test_behind_many_that_wait_for_a_better_worker_only_other_tenants_are_tried",
        place="router.core.queueing.backfill",
    ),
    Bound(
        "prefix_blocks_max",
        "the oldest is forgotten",
        "1,048,576 entries of all workers: 228 MiB",
        f"{UNIT}/core/fleet/test_placement.py::test_the_prefix_index_is_bounded_and_forgets_tails_before_heads",
    ),
    Bound(
        "ended_requests_max",
        "the oldest is forgotten",
        "1,000 entries: 4 MiB",
        f"{UNIT}/core/test_dispatch.py::test_what_debug_remembers_is_bounded",
    ),
    Bound(
        "imbalance_tokens_max",
        "cache hits are ignored",
        "none",
        f"{UNIT}/core/fleet/test_placement.py::test_a_hot_prefix_cannot_starve_its_pod",
    ),
    Bound(
        "imbalance_ratio_max",
        "cache hits are ignored",
        "none",
        f"{UNIT}/core/fleet/test_placement.py::test_a_hot_prefix_cannot_starve_its_pod",
    ),
    Bound(
        "own_worker_tokens_max",
        "another worker gets the prefix",
        "none",
        f"{UNIT}/core/fleet/test_placement.py"
        "::test_the_own_worker_is_left_where_it_is_far_behind_or_was_never_of_use",
    ),
    Bound(
        "SLOWNESS_MAX",
        "a slower decode worker counts as one whose step takes sixteen times as long",
        "16 times",
        f"{UNIT}/core/fleet/test_placement.py"
        "::test_a_decode_worker_whose_steps_take_four_times_as_long_holds_a_quarter",
        place="router.placement_policies",
    ),
    Bound(
        "TENANTS_MAX",
        "the oldest starts at the clock again",
        "10,000 entries: 1 MiB",
        f"{UNIT}/core/requests/test_virtual_time.py::test_the_tenants_remembered_are_bounded",
        place="router.core.requests.request_queue",
    ),
    Bound(
        "IDLE_TENANTS_MAX",
        "the oldest is forgotten, with what it owes",
        "10,000 entries: 5 MiB",
        f"{UNIT}/core/requests/test_tenants.py::test_tenants_are_forgotten_and_those_that_owe_tokens_are_bounded",
        place="router.core.requests.tenants",
    ),
    Bound(
        "KEYS_FILE_BYTES_MAX",
        "refused at the start; later the keys of before stay",
        "1 MiB, and 4 MiB as keys; wrong keys leave nothing",
        "tests/unit/test_api_keys.py::test_a_file_is_no_larger_than_a_secret",
        place="shared.process.api_keys",
    ),
    Bound(
        "VISITS_MAX",
        "the oldest placement of a request is forgotten",
        "32 entries a request",
        f"{UNIT}/core/queueing/test_dispatch_bounds.py::test_the_placements_remembered_of_a_request_are_bounded",
        place="router.core.requests.live_request",
    ),
    Bound(
        "MODELS_MAX",
        "the oldest name is forgotten",
        "64 names",
        f"{UNIT}/core/fleet/test_fleet.py::test_names_of_gone_models_are_bounded_and_the_configured_one_stays",
        place="router.core.fleet.workers",
    ),
)
