"""Every bound on what strangers and admitted peers may take from a link, or from a worker that offers KV pages.

Strangers have no key. Peers are routers and workers of the same deployment, perhaps in other hands.
"""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

UNIT, INTEGRATION = "tests/unit", "tests/integration"
LINK_BOUNDS_TEST = f"{INTEGRATION}/links/test_link_bounds.py"
BEYOND = f"{LINK_BOUNDS_TEST}::test_a_command_beyond_a_bound_ends_its_session_alone_and_is_never_built"
UNREAD = f"{LINK_BOUNDS_TEST}::test_what_a_worker_that_computes_may_leave_unread_is_bounded"
SETTINGS = "shared.links.session.LinkSettings"
PARTS = f"{UNIT}/links/test_parts.py"
TLS, ENDS = f"{UNIT}/transfer/test_tls.py", f"{UNIT}/transfer/test_tls_ends.py"
READER, THIEVES = f"{UNIT}/transfer/test_tls_reader.py", f"{UNIT}/transfer/test_tls_thieves.py"
KV_STRANGERS = f"{INTEGRATION}/transfer/test_kv_strangers.py"
ALL_READERS = (
    f"{KV_STRANGERS}::test_as_many_readers_as_may_come_with_the_longest_requests_cost_bounded_memory"
)
WORKER, DECODE_CONFIG, PROCESS = (
    "shared.worker.worker_config.WorkerConfig",
    "decode.config.DecodeConfig",
    "shared.process.process_config.ProcessConfig",
)

GRAMMARS = "tests/unit/grammars/test_grammar_bounds.py"
SLICES = f"{UNIT}/engine/parallel/test_slices.py"
LINK_BOUNDS = (
    # strangers
    Bound(
        "FRAME_BYTES_MAX",
        "the connection closes",
        "64 KiB a stranger, until its handshake is over: 130 who send all they can cost less than 32 MiB",
        "tests/abuse/test_strangers.py::test_130_strangers_who_send_all_they_can_cost_a_worker_little",
        place="shared.links.session",
    ),
    Bound(
        "silence_seconds",
        "the connection closes, or the session ends",
        "3 s a handshake; 3 s until a peer that is silent is lost",
        "tests/abuse/test_strangers.py::test_a_stranger_at_a_links_port_is_refused[nothing]",
        place=PROCESS,
    ),
    Bound(
        "CAUSES_MAX",
        "counted as other",
        "256 names; one line for the 1st, 2nd, 4th, 8th time",
        f"{UNIT}/test_primitives.py::test_the_causes_that_are_told_apart_are_bounded",
        place="shared.primitives.tally",
    ),
    # peers
    Bound(
        "PART_BYTES_MAX",
        "longer messages travel in parts",
        "63 KiB a part, and a Hello has one",
        f"{PARTS}::test_messages_of_any_sizes_arrive_whole_and_in_order_in_frames_of_bounded_size",
        place="shared.links.session",
    ),
    Bound(
        "message_bytes_max",
        "the session ends while the message arrives",
        "8 MiB a session, before anything is decoded",
        f"{BEYOND}[bytes]",
        place=SETTINGS,
    ),
    Bound(
        "report_bytes_max",
        "the session ends while the message arrives",
        "1 MiB a worker; decoded 42 MiB and 0.2 s of a router at most",
        f"{PARTS}::test_a_router_takes_nothing_longer_than_a_report",
        place=SETTINGS,
    ),
    Bound(
        "NUMBERS_MAX",
        "the session ends, and nothing is built",
        "token ids and pages of one command: 84 MiB and 0.3 s, in 1 GiB of address space",
        f"{BEYOND}[token ids]",
        place="shared.wire.bounds",
    ),
    *(
        Bound(
            name,
            "the session ends, and the worker is dialed again after a rest",
            f"none: {why}",
            "tests/unit/links/test_bounds.py::"
            "test_a_number_at_its_extremes_is_within_its_bounds_or_cannot_be_read",
            place="shared.wire.bounds",
        )
        for name, why in (
            ("COUNT_MAX", "what a worker counts, so that sums stay exact"),
            ("VOCABULARY_MAX", "a token id"),
            ("ADDRESS_MAX", "memory that a baton names"),
            ("SECONDS_MAX", "what a worker says that something took"),
            ("BYTES_PER_SECOND_MAX", "what a worker says of a link"),
        )
    ),
    Bound(
        "FAULT_REST_SECONDS_MAX",
        "the longest rest before a worker is dialed again whose own words ended its sessions",
        "no more requests are lost to it than come in so long",
        "tests/unit/links/test_bounds.py::test_a_worker_that_lies_again_is_dialed_later_each_time",
        place="shared.links.dialing",
    ),
    Bound(
        "NAME_CHARACTERS_MAX",
        "the session ends",
        "4 KiB a name",
        f"{BEYOND}[a name]",
        place="shared.wire.baton",
    ),
    Bound(
        "RANKS_MAX",
        "the session ends",
        "64 GPUs of one worker, of which 64 KiB of metadata together pass a router",
        f"{BEYOND}[ranks]",
        place="shared.wire.baton",
    ),
    Bound(
        "MAX_STOP_TOKEN_IDS",
        "the session ends; a client has met 400",
        "64 numbers a request",
        f"{BEYOND}[stop ids]",
        place="shared.wire.sampling_params",
    ),
    Bound(
        "MAX_LOGIT_BIAS_ENTRIES",
        "the session ends; a client has met 400",
        "300 entries a request",
        f"{BEYOND}[biases]",
        place="shared.wire.sampling_params",
    ),
    Bound(
        "MAX_ALLOWED_TOKEN_IDS",
        "the session ends; a client has met 400",
        "1,024 numbers a request",
        f"{BEYOND}[allowed ids]",
        place="shared.wire.sampling_params",
    ),
    Bound(
        "MAX_BAD_WORDS",
        "the session ends; a client has met 400",
        "64 words a request",
        f"{BEYOND}[bad words]",
        place="shared.wire.sampling_params",
    ),
    Bound(
        "MAX_BAD_WORD_TOKENS",
        "the session ends; a client has met 400",
        "32 numbers a word",
        f"{BEYOND}[a bad word]",
        place="shared.wire.sampling_params",
    ),
    Bound(
        "GRAMMAR_CHARACTERS_MAX",
        "the session ends; a client has met 400",
        "64 KiB a request",
        f"{BEYOND}[a grammar]",
        place="shared.wire.grammar",
    ),
    Bound(
        "FAILED_CHARACTERS_MAX",
        "the session ends",
        "4 KiB a message",
        f"{UNIT}/links/test_wire.py::test_a_worker_cannot_send_an_endless_sentence",
        place="shared.wire.messages",
    ),
    Bound(
        "SCORES_MAX",
        "the worker splits them; a longer message ends the session",
        "256 tokens with up to 20 likely ones, 100 KiB a message",
        f"{UNIT}/links/test_wire.py::test_a_report_holds_no_more_scores_than_the_bound",
        place="shared.wire.messages",
    ),
    *(
        Bound(
            name,
            "400",
            fixed,
            f"{GRAMMARS}::test_each_bound_is_met_exactly[{case}]",
            place="shared.limits.grammars",
        )
        for name, fixed, case in (
            ("REGEX_CHARACTERS_MAX", "32 KiB of a grammar's 64", "regex"),
            ("SCHEMA_NESTING_MAX", "no recursion of a decoder", "nesting"),
            ("SCHEMA_PROPERTIES_MAX", "20 ms of compiling", "properties"),
            ("ALL_PROPERTIES_MAX", "0.2 s of compiling", "all properties"),
            ("SCHEMA_VALUES_MAX", "3 ms of compiling", "values"),
            ("LARK_RULES_MAX", "8 MiB of stack", "rules"),
        )
    ),
    Bound(
        "TOP_LOGPROBS_MAX",
        "the session ends",
        "20 tokens and their logprobs a token",
        "tests/unit/links/test_wire.py::test_a_report_names_no_more_of_the_likeliest_than_the_bound",
        place="shared.wire.sampled",
    ),
    Bound(
        "REASON_CHARACTERS_MAX",
        "the rest of a reason is cut",
        "1,000 characters in a log line",
        f"{PARTS}::test_a_reason_of_any_length_is_kept_cut",
        place="shared.links.session",
    ),
    Bound(
        "READ_BATCH",
        "the rest is read in the next turn",
        "256 parts a socket and turn",
        f"{PARTS}::test_a_turn_reads_no_more_from_one_socket_than_decoding_soon_ends",
        place="shared.links.poller",
    ),
    Bound(
        "READ_BATCH_BYTES",
        "the rest is read in the next turn",
        "0.2 s of decoding a socket and turn",
        f"{PARTS}::test_a_turn_reads_no_more_from_one_socket_than_decoding_soon_ends",
        place="shared.links.poller",
    ),
    Bound(
        "unread_messages_max",
        "the session of whoever sends more ends",
        "16,384 messages of all peers together, and one load of each peer",
        f"{UNREAD}[messages]",
        place=SETTINGS,
    ),
    Bound(
        "unread_bytes_max",
        "the session of whoever sends more ends",
        "32 MiB as they came, of all peers together: 450 MiB as prompts, in 1 GiB of address space; "
        "1.3 GiB as numbers that no tokenizer has",
        f"{UNREAD}[bytes]",
        place=SETTINGS,
    ),
    Bound(
        "unsent_messages_max",
        "the session ends",
        "4,096 parts a peer and direction in ZMQ: 252 MiB if all are full",
        f"{INTEGRATION}/links/test_links.py"
        "::test_a_router_that_reads_too_slowly_loses_its_session_and_the_worker_never_blocks",
        place=SETTINGS,
    ),
    Bound(
        "unsent_bytes_max",
        "the session ends",
        "64 MiB a peer",
        f"{UNIT}/links/test_thread.py::test_more_than_may_wait_for_a_busy_link_thread_ends_the_session",
        place=SETTINGS,
    ),
    Bound(
        "SOCKETS_MAX",
        "that dial fails, and is tried again",
        "21,845 workers of one router",
        f"{INTEGRATION}/links/test_links.py"
        "::test_workers_that_cannot_be_dialed_when_sockets_are_used_up_cost_no_other_its_link",
        place="shared.links.sockets",
    ),
    Bound(
        "redial_seconds_max",
        "dials are no rarer",
        "a worker that is back is found within 2 s",
        f"{UNIT}/links/test_sessions.py::test_redials_slow_down_to_their_limit",
        place=SETTINGS,
    ),
)

KV_BOUNDS = (
    # strangers
    Bound(
        "HANDSHAKES_MAX",
        "the oldest handshake ends",
        "16 TLS states and sockets",
        f"{KV_STRANGERS}::test_silent_strangers_keep_no_worker_out",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "HANDSHAKE_SECONDS_MAX",
        "the connection closes",
        "3 s",
        f"{KV_STRANGERS}::test_silent_strangers_keep_no_worker_out",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "HANDSHAKE_BYTES_MAX",
        "the connection closes",
        "16 KiB a stranger",
        f"{TLS}::test_a_handshake_is_bounded_in_bytes",
        place="shared.transfer.tls.keys",
    ),
    # workers
    Bound(
        "CONNECTIONS_MAX",
        "the connection closes",
        "512 KiB and a thread each; all with the longest requests: 200 MiB, and 128 MiB in the kernel; of a rank of a "
        "worker up to 16 times as many",
        ALL_READERS,
        place="shared.transfer.tls.server",
    ),
    Bound(
        "SPANS_MAX",
        "the connection closes, and nothing is built",
        "0.6 MiB a connection",
        f"{TLS}::test_a_request_of_more_spans_than_a_holder_answers_is_none",
        place="shared.transfer.reader",
    ),
    Bound(
        "REQUEST_BYTES_MAX",
        "the connection closes",
        "256 KiB a connection",
        f"{TLS}::test_a_frame_larger_than_a_portion_is_refused_before_it_is_read",
        place="shared.transfer.tls.protocol",
    ),
    Bound(
        "PORTION_BYTES",
        "pages come in several frames, and the lease is looked at before each",
        "a frame and a buffer of 256 KiB a connection; an ended lease gives 256 KiB more",
        f"{ENDS}::test_a_lease_that_ends_in_mid_read_ends_the_read_at_the_next_portion",
        place="shared.transfer.tls.channel",
    ),
    Bound(
        "FRAMES_MAX",
        "the reader makes another connection before its next read",
        "256 GiB under one key",
        f"{READER}::test_a_key_that_has_sealed_enough_is_left_between_two_reads_and_none_is_lost",
        place="shared.transfer.tls.channel",
    ),
    Bound(
        "KEY_SECONDS_MAX",
        "the reader makes another connection before its next read",
        "a key lives for an hour",
        f"{READER}::test_a_key_that_is_old_enough_is_left_between_two_reads",
        place="shared.transfer.tls.channel",
    ),
    Bound(
        "PEERS_COUNTED_MAX",
        "reads of further addresses are counted as those of others",
        "257 series of each metric of reads",
        f"{THIEVES}::test_addresses_beyond_the_bound_are_counted_together",
        place="shared.transfer.counters",
    ),
    Bound(
        "SEND_BUFFER_BYTES",
        "the holder's thread of that connection waits",
        "1 MiB in the kernel a connection, which doubles what it is told",
        f"{ENDS}::test_a_reader_that_does_not_read_is_cut_after_a_while",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "SEND_SECONDS_MAX",
        "the connection is cut",
        "30 s without a byte taken",
        f"{ENDS}::test_a_reader_that_does_not_read_is_cut_after_a_while",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "IDLE_SECONDS_MAX",
        "the connection closes",
        "120 s without a request",
        f"{ENDS}::test_a_connection_without_a_request_is_closed_after_a_while",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "REFUSAL_BYTES_MAX",
        "the sentence is cut",
        "200 bytes a refusal",
        f"{ENDS}::test_a_refusal_of_any_length_is_sent_cut",
        place="shared.transfer.tls.server",
    ),
    Bound(
        "CONNECT_SECONDS_MAX",
        "the read fails",
        "5 s; the fence waits no longer",
        f"{ENDS}::test_the_fence_waits_for_no_connection_that_is_about_to_begin",
        place="shared.transfer.tls.transport",
    ),
    Bound(
        "PEERS_MAX",
        "the one used longest ago is forgotten",
        "64 threads and connections of a reader",
        f"{UNIT}/transfer/test_kv_links.py::test_the_peers_used_last_are_remembered_and_no_others",
        place="shared.transfer.reader",
    ),
    Bound(
        "RANKS_MAX",
        "the fetch is refused in a sentence, and the router tries another worker",
        "16 GPUs of a worker that is read",
        f"{SLICES}::test_a_holder_with_unsound_ranks_is_refused_in_a_sentence[too many ranks]",
        place="shared.transfer.memory",
    ),
    Bound(
        "ANSWER_SECONDS_MAX",
        "the worker ends, and says which rank did not answer",
        "30 s for the reader of another rank of this worker, or its end",
        f"{UNIT}/transfer/test_told_rank.py::test_a_rank_that_does_not_answer_ends_the_worker",
        place="shared.transfer.ranks.told_rank",
    ),
    Bound(
        "FETCHES_PER_SLOT",
        "the request is refused, and the router tries another worker",
        "four fetches for each of `--max-running-requests`",
        "tests/fetcher_contract.py::test_more_fetches_than_the_bound_are_refused",
        place="shared.worker.worker",
    ),
    Bound(
        "fetch_seconds_max",
        "the request is refused as unreachable",
        "10 s without progress; its pages go into quarantine",
        "tests/fetcher_contract.py::test_a_read_from_a_frozen_holder_ends_when_the_holder_answers_after_all",
        place=DECODE_CONFIG,
    ),
    Bound(
        "quarantine_seconds",
        "the reader is closed, which ends the read",
        "pages of one request for 10 s",
        "tests/fetcher_contract.py::test_a_read_from_a_holder_that_stays_frozen_is_fenced",
        place=WORKER,
    ),
)
