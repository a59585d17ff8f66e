"""Every bound on what those take from a router who watch it."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

EVENTS, PAGE = (f"tests/unit/router/live/test_live_{name}.py" for name in ("events", "page"))
WORST = f"{EVENTS}::test_however_much_happens_watchers_are_told_a_bounded_number_of_events_and_the_sums"
UNREAD = f"{EVENTS}::test_a_watcher_that_does_not_read_is_dropped"
OTHERS = "tests/unit/router/live/test_router_pictures.py::test_of_what_is_no_picture_nothing_is_shown"

LIVE_BOUNDS = (
    Bound(
        "WATCHERS_MAX",
        "503",
        "each batch and each picture is written 8 times, to 4 watchers at each of two ports; it is encoded once",
        f"{EVENTS}::test_no_more_may_watch_than_the_bound_says",
        place="router.live.feed",
    ),
    Bound(
        "WATCHERS_OF_TENANT_MAX",
        "503",
        "half of the places at the API's port",
        f"{EVENTS}::test_no_more_may_watch_than_the_bound_says",
        place="router.live.feed",
    ),
    Bound(
        "EVENTS_A_SECOND_MAX",
        "events are told as sums",
        "100 events in ten batches a second, 8 KiB",
        WORST,
        place="router.live.feed",
    ),
    Bound(
        "REQUESTS_MAX",
        "further requests are counted, not listed",
        "256 requests a second and router, 16 KiB",
        f"{EVENTS}::test_a_picture_lists_a_bounded_number_of_requests_and_counts_the_others",
        place="router.live.picture",
    ),
    Bound(
        "NAME_CHARACTERS_MAX",
        "the picture of that router is not shown",
        "1,024 characters a name",
        f"{OTHERS}[a long name]",
        place="router.live.router_pictures",
    ),
    Bound(
        "ENTRIES_MAX",
        "the picture of that router is not shown",
        "4,096 pods, flows and states of each of seven routers",
        f"{OTHERS}[many pods]",
        place="router.live.router_pictures",
    ),
    Bound(
        "UNREAD_BYTES_MAX",
        "the connection is dropped",
        "512 KiB a watcher, 4 MiB of all",
        f"{UNREAD}[API]",
        place="router.live.endpoint",
    ),
    Bound(
        "BODY_BYTES_MAX",
        "400",
        "1 KiB",
        f"{PAGE}::test_the_page_itself_may_ask_and_kills_a_worker_by_its_token",
        place="router.live.endpoint",
    ),
    Bound(
        "EXEMPLAR_ID_CHARACTERS_MAX",
        "the bucket names no request",
        "118 characters for each of 34 buckets, the last request's",
        "tests/unit/process/test_openmetrics.py"
        "::test_an_id_that_is_longer_than_openmetrics_allows_is_counted_and_not_named",
        place="shared.process.metrics",
    ),
    Bound(
        "UNREAD_BYTES_MAX",
        "the connection is dropped",
        "512 KiB a stream",
        f"{UNREAD}[admin]",
        place="shared.process.admin_port",
    ),
)
