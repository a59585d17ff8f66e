"""Every bound on what all client connections of a router may take together, and what a key's holder may at once."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

FULL = "tests/abuse/test_full_bounds.py"
UNIT = "tests/unit/router"
HANDSHAKES = (
    "tests/abuse/test_handshakes.py"
    "::test_handshakes_of_strangers_delay_nobody_and_leave_the_router_most_of_its_time"
)

CONNECTION_BOUNDS = (
    Bound(
        "connections_max",
        "the oldest without a request closes; 503 where each has one",
        "10 KiB each: 80 MiB",
        f"{FULL}::test_every_connection_that_is_allowed_fits_into_memory",
    ),
    Bound(
        "connections_per_address_max",
        "the same, among those of the address",
        "10 KiB each: 40 MiB of one address",
        f"{FULL}::test_every_connection_that_is_allowed_fits_into_memory",
    ),
    Bound(
        "SECURED_BYTES_MAX",
        "with TLS the same, beyond 3072 connections",
        "128 KiB each: 384 MiB",
        f"{UNIT}/listener/test_tls.py::test_secured_connections_are_no_more_than_have_memory",
        place="router.listener.connections",
    ),
    Bound(
        "CONNECTION_BYTES",
        "TLS is given portions of 16 KiB",
        "128 KiB each",
        f"{UNIT}/listener/test_tls.py::test_a_secured_connection_costs_little_whatever_came_on_it",
        place="router.listener.tls_input",
    ),
    Bound(
        "HANDSHAKE_SHARE",
        "handshakes wait for their turn, within head_seconds_max; addresses take turns",
        "a quarter of the loop's time",
        HANDSHAKES,
        place="router.listener.tls_input",
    ),
    Bound(
        "TURN_SECONDS",
        "the next handshakes wait",
        "2 ms at once, and what is left of one handshake",
        HANDSHAKES,
        place="router.listener.tls_input",
    ),
    Bound(
        "DESCRIPTOR_RESERVE",
        "the oldest connection without a request closes",
        "no memory",
        "tests/abuse/test_faults.py::test_streams_are_bit_equal_through_a_fault"
        "[the router has no descriptor left and a worker dies]",
        place="router.listener.connections",
    ),
    Bound(
        "SILENT_SECONDS_MAX",
        "the connection closes, while three quarters of all are taken",
        "2 s without a byte",
        f"{UNIT}/listener/test_connection_places.py::test_when_crowded_silent_connections_go_sooner",
        place="router.listener.connections",
    ),
    Bound(
        "HELD_BYTES_MAX",
        "431 or 503",
        "64 MiB of all incomplete heads together",
        f"{FULL}::test_incomplete_heads_together_fit_into_memory",
        place="router.listener.connections",
    ),
    Bound(
        "UNREAD_BYTES_MAX",
        "the connections with the most unread bytes are cut",
        "80 MiB of all unread answers together, in the router and in the kernel",
        f"{UNIT}/listener/test_client_connections.py"
        "::test_unread_answers_of_all_connections_have_a_total_and_the_fullest_is_cut",
        place="router.listener.connections",
    ),
    Bound(
        "RESERVED_OUTPUT_MAX",
        "what comes beyond it is paid as it comes",
        "256 tokens of each answer, of what its key may have in a minute",
        f"{UNIT}/access/test_usage_accounts.py"
        "::test_what_was_reserved_is_paid_from_and_what_is_left_given_back_however_it_ends",
        place="router.access.quotas",
    ),
)
