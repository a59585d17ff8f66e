"""Every bound on what clients may take from a router by headers about streams that are resumed."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

TESTS = "tests/unit/router/openai/answers/test_resumable_streams.py"

RESUMING_BOUNDS = (
    Bound(
        "EVENT_ID_CHARS_MAX",
        "400",
        "4 KiB",
        f"{TESTS}::test_what_cannot_be_resumed_is_refused_by_name",
        place="router.openai.answers.resumable_streams",
    ),
    *(
        Bound(name, met, fixed, f"{TESTS}::{test}", place="router.openai.answers.resumable_streams")
        for name, met, fixed, test in (
            (
                "IDEMPOTENCY_KEY_CHARS_MAX",
                "400",
                "255 bytes",
                "test_an_idempotency_key_gives_the_same_answer_at_every_router",
            ),
            (
                "IDEMPOTENCY_KEYS_MAX",
                "the oldest are forgotten",
                "3 MB",
                "test_idempotency_keys_are_remembered_for_a_while_and_in_a_bounded_number",
            ),
            (
                "RESUMABLE_CHOICES_MAX",
                "400",
                "64 places in each id",
                "test_a_stream_of_too_many_choices_gets_no_ids",
            ),
        )
    ),
)
