"""Every bound on what routers may take from a worker, and anybody from a process: its admin port, log and discovery."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

UNIT = "tests/unit"
ADMIN = f"{UNIT}/process/test_admin_port.py"
LOGS = f"{UNIT}/process/test_logs.py"
PREFILL = f"{UNIT}/prefill/test_prefill_scheduler.py"
DISCOVERY = "tests/integration/routers/test_kubernetes_discovery.py"
WORKER, PREFILL_CONFIG, DECODE_CONFIG, PROCESS = (
    "shared.worker.worker_config.WorkerConfig",
    "prefill.config.PrefillConfig",
    "decode.config.DecodeConfig",
    "shared.process.process_config.ProcessConfig",
)

WORKER_BOUNDS = (
    Bound(
        "max_queued_requests",
        "the request is refused, and the router tries another worker",
        "1,024 prompts of one context each: 320 MiB at 8,192 tokens",
        f"{PREFILL}::test_a_full_queue_refuses",
        place=PREFILL_CONFIG,
    ),
    Bound(
        "context_len",
        "the request is refused as too long",
        "the KV pages of one context; `NUMBERS_MAX` tokens at most",
        f"{PREFILL}::test_what_never_fits_is_refused_at_intake",
        place=WORKER,
    ),
    Bound(
        "leases_max",
        "requests wait",
        "8 KiB of words",
        f"{PREFILL}::test_without_lease_words_requests_wait",
        place=PREFILL_CONFIG,
    ),
    Bound(
        "lease_fraction",
        "requests wait before they are computed",
        "half of the pool",
        f"{PREFILL}::test_nothing_starts_while_leases_hold_too_much",
        place=PREFILL_CONFIG,
    ),
    Bound(
        "lease_seconds",
        "the lease ends, and the router is told",
        "the pages of a request for 10 s after the last renewal",
        f"{PREFILL}::test_a_lease_that_is_not_renewed_ends_and_the_router_hears_of_it",
        place=WORKER,
    ),
    Bound(
        "prefix_aware_queue_max",
        "the queue is served in the order of arrival",
        "128 look-ups in the cache a turn",
        f"{PREFILL}::test_a_long_queue_is_served_by_arrival_where_matching_costs_too_much",
        place=PREFILL_CONFIG,
    ),
    Bound(
        "shared_prefix_cached_tokens_max",
        "the request does not wait for another's prefix",
        "one round of waiting",
        f"{UNIT}/scheduling/test_queue_policy.py"
        "::test_a_request_with_much_of_its_prefix_cached_does_not_wait",
        place=PREFILL_CONFIG,
    ),
    Bound(
        "max_running_requests",
        "requests wait in the router",
        "64 slots of the device",
        f"{UNIT}/decode/test_admission.py::test_without_a_slot_there_is_no_room",
        place=WORKER,
    ),
    Bound(
        "tenant_share_max",
        "requests of that tenant wait",
        "95 % of slots and pages",
        f"{UNIT}/decode/test_tenants_on_decode.py::test_one_tenant_leaves_slots_and_pages_to_others",
        place=PROCESS,
    ),
    Bound(
        "retractions_max",
        "the request is retracted last",
        "three copies of its pages to host memory and back, and more only where nobody else is left",
        f"{UNIT}/decode/test_retraction.py"
        "::test_fewest_output_tokens_are_retracted_first_and_the_longest_prompt_on_ties",
        place=DECODE_CONFIG,
    ),
    Bound(
        "turn_seconds",
        "the request is retracted, if another one is in line that does not fit beside it",
        "a retracted request waits for as many turns as others share its memory",
        f"{UNIT}/decode/test_turns.py"
        "::test_requests_that_do_not_fit_together_run_in_turns_and_none_pauses_for_long",
        place=DECODE_CONFIG,
    ),
    Bound(
        "BACKFILL_MAX",
        "requests below their share wait until the retracted ones have returned",
        "32 requests below their share go first",
        f"{UNIT}/decode/test_tenants_on_decode.py"
        "::test_a_retracted_request_returns_however_many_small_ones_come",
        place="decode.admission",
    ),
    Bound(
        "METADATA_BYTES_MAX",
        "the request is lost there, and goes on elsewhere",
        "64 KiB a worker, kept by a router",
        f"{UNIT}/router/core/worker_events/test_untrusted_workers.py::test_a_baton_that_cannot_be_the_requests_is_passed_to_nobody",
        place="router.core.worker_events.worker_replies",
    ),
    Bound(
        "ADDRESS_MAX",
        "the request is refused",
        "nothing is read",
        f"{UNIT}/scheduling/test_sound_commands.py::test_a_decode_worker_refuses_a_baton_that_no_worker_made",
        place="shared.scheduling.sound_commands",
    ),
    Bound(
        "LEASES_MAX",
        "the request is refused",
        "nothing is read",
        f"{UNIT}/scheduling/test_sound_commands.py::test_a_decode_worker_refuses_a_baton_that_no_worker_made",
        place="shared.scheduling.sound_commands",
    ),
    Bound(
        "step_seconds_max",
        "the worker has no sessions until its loop turns",
        "its streams continue elsewhere after 10 s",
        f"{UNIT}/links/test_loop_watch.py"
        "::test_a_loop_that_hangs_ends_its_sessions_and_gets_none_until_it_turns",
        place=WORKER,
    ),
    Bound(
        "WAITING_GRAMMARS_MAX",
        "the request is refused, and the router tries another worker",
        "64 requests that wait for a compile",
        f"{UNIT}/grammars/test_grammar_gate.py::test_those_that_wait_are_bounded",
        place="shared.worker.grammar_gate",
    ),
    Bound(
        "drain_seconds",
        "the worker exits, and its requests continue elsewhere",
        "30 s",
        f"{UNIT}/scheduling/test_drain.py::test_a_worker_drains_no_longer_than_it_may_and_says_what_it_held",
        place=WORKER,
    ),
)

PROCESS_BOUNDS = (
    # the admin port
    Bound(
        "CONNECTIONS_MAX",
        "the oldest without a whole head closes, of the address with most; where all are answered, the next one waits",
        "128 connections that have said something, no thread each",
        f"{ADMIN}::test_half_heads_go_the_oldest_first_of_the_address_with_most",
        place="shared.process.admin_port",
    ),
    Bound(
        "SILENT_MAX",
        "the oldest closes, of the address with most",
        "1,024 descriptors, and an eighth of the process's",
        f"{ADMIN}::test_silent_connections_keep_nobody_out",
        place="shared.process.admin_port",
    ),
    Bound(
        "SILENT_SECONDS_MAX",
        "the connection closes",
        "10 s without a byte",
        f"{ADMIN}::test_a_silent_connection_ends_by_itself",
        place="shared.process.admin_port",
    ),
    Bound(
        "ACCEPTED_PER_SECOND_MAX",
        "the connection closes unread",
        "1,000 a second of an address that is not the machine's own",
        f"{ADMIN}::test_an_address_that_connects_too_often_is_closed_unread_but_not_the_machines_own",
        place="shared.process.admin_port",
    ),
    Bound(
        "FIRST_BYTES_MAX",
        "more is read later",
        "16 KiB a connection",
        f"{ADMIN}::test_what_else_comes_gets_one_short_answer[an endless head]",
        place="shared.process.admin_port",
    ),
    Bound(
        "HEAD_BYTES_MAX",
        "431",
        "16 KiB a connection: 2 MiB",
        f"{ADMIN}::test_what_else_comes_gets_one_short_answer[an endless head]",
        place="shared.process.admin_port",
    ),
    Bound(
        "REQUEST_SECONDS_MAX",
        "the connection closes",
        "10 s from its first bytes to its end",
        f"{ADMIN}::test_a_silent_connection_ends_by_itself",
        place="shared.process.admin_port",
    ),
    Bound(
        "PUBLISH_SECONDS_MAX",
        "the figures are older",
        "1 s for a scrape",
        f"{UNIT}/router/test_admin.py::test_while_the_loop_hangs_the_port_answers_and_after_a_while_says_so",
        place="router.admin",
    ),
    Bound(
        "DEBUG_SECONDS_MAX",
        "503",
        "5 s for a page of a request",
        f"{UNIT}/router/test_admin.py::test_while_the_loop_hangs_the_port_answers_and_after_a_while_says_so",
        place="router.admin",
    ),
    Bound(
        "loop_seconds_max",
        "`/livez` answers 503",
        "60 s until the process is ended",
        f"{UNIT}/process/test_probes.py::test_a_worker_is_alive_while_loading_and_while_its_loop_beats",
        place=PROCESS,
    ),
    # the log
    Bound(
        "QUEUE_BYTES_MAX",
        "lines are dropped and counted",
        "16 MiB while nobody reads stderr",
        f"{LOGS}::test_a_stderr_that_nobody_reads_blocks_nobody_and_what_was_dropped_is_counted_and_told_once",
        place="shared.process.logs",
    ),
    Bound(
        "LINE_BYTES_MAX",
        "the line is cut",
        "32 KiB",
        f"{LOGS}::test_lines_and_notes_stay_in_order_and_a_long_line_is_cut",
        place="shared.process.logs",
    ),
    Bound(
        "FLUSH_SECONDS_MAX",
        "the process ends without its last lines",
        "2 s",
        f"{LOGS}::test_the_end_of_a_process_does_not_wait_for_a_reader_for_ever",
        place="shared.process.logs",
    ),
    Bound(
        "OBSERVATIONS_MAX",
        "the oldest measurement is forgotten",
        "65,536 figures a metric that nobody publishes",
        f"{UNIT}/process/test_metrics.py::test_measurements_that_nobody_publishes_are_bounded",
        place="shared.primitives.metric_fields",
    ),
    # discovery
    Bound(
        "LIST_SECONDS_MAX",
        "the list is given up and tried again",
        "10 s; links stay as they are",
        f"{DISCOVERY}::test_a_router_that_starts_while_the_api_server_is_in_trouble_waits_for_it",
        place="router.discovery.slice_api",
    ),
    Bound(
        "PAUSE_SECONDS_MAX",
        "pauses between failures grow no longer",
        "5 s",
        f"{UNIT}/router/discovery/test_polling.py"
        "::test_pauses_between_failures_double_up_to_their_limit_and_only_lists_are_tried",
        place="router.discovery.polling",
    ),
    Bound(
        "CLOSING_SECONDS_MAX",
        "the process ends without its thread",
        "1 s",
        f"{DISCOVERY}::test_closing_does_not_wait_for_a_watch",
        place="router.discovery.kubernetes",
    ),
    Bound(
        "ANSWER_SECONDS_MAX",
        "502",
        "3 s for a question to another router",
        f"{UNIT}/router/discovery/test_router_peers.py::test_a_peer_that_is_silent_is_a_502",
        place="router.discovery.router_peers",
    ),
    Bound(
        "ANSWER_BYTES_MAX",
        "no answer: 502, or a router that is not shown",
        "4 MiB of each of 4 answers, as they were sent",
        "tests/abuse/test_peer_answers.py"
        "::test_as_many_answers_as_are_read_at_once_cost_no_more_than_their_bound[without end]",
        place="router.discovery.router_peers",
    ),
    Bound(
        "CONNECTIONS_MAX",
        "further questions wait, within those 3 s",
        "4 connections to other routers",
        f"{UNIT}/router/discovery/test_router_peers.py::test_a_peer_that_is_silent_is_a_502",
        place="router.discovery.router_peers",
    ),
)
