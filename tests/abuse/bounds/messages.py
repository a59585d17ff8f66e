"""Every bound on what clients may take from a router by /v1/messages beyond what all its paths have."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

TESTS = "tests/unit/router/openai/messages/test_prompts.py"

MESSAGES_BOUNDS = (
    Bound(
        "OBJECTS_PER_TOKEN_MAX",
        "400",
        "four messages, blocks and objects in them for each token of the context, of one of two tokenizer threads",
        f"{TESTS}::test_more_blocks_than_the_context_could_hold_are_not_read",
        place="router.openai.messages.history",
    ),
)
