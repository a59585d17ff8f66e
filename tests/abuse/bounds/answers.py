"""Every bound on what answers hold until they are written. `test_heaviest_answers` goes there with 1 GiB."""

from __future__ import annotations

from tests.abuse.bounds.bound import Bound

ANSWERS = "tests/abuse/test_heaviest_answers.py"

ANSWER_BOUNDS = (
    Bound(
        "answers_bytes_max",
        "429; 400 where one answer would hold more than a quarter of it",
        "128 MiB of all answers that are not streamed, half of it for one client, and 32 KiB of each that is shorter",
        f"{ANSWERS}::test_many_of_the_heaviest_at_once_stay_within_the_budget",
    ),
    Bound(
        "ANSWER_SHARE",
        "400 with the figures",
        "32 MiB of one answer",
        f"{ANSWERS}::test_the_heaviest_answer_costs_little_and_nobody_else_waits"
        "[n 64 of logprobs up to the context]",
        place="router.openai.answers.answer_bytes",
    ),
    Bound(
        "FREE_BYTES",
        "an answer's text counts in answers_bytes_max",
        "32 KiB of each answer that is under way",
        "tests/unit/router/openai/answers/test_answer_bytes.py::test_a_short_answer_is_served_however_full_the_budget_is",
        place="router.openai.answers.answer_bytes",
    ),
    Bound(
        "UNSAID_TOKENS_MAX",
        "an output without max_tokens counts as it comes",
        "32 MiB of one answer",
        "tests/unit/router/openai/answers/test_answer_bytes.py"
        "::test_an_output_without_a_limit_is_reckoned_as_a_usual_one_and_counted_as_it_comes",
        place="router.openai.answers.answer_bytes",
    ),
    Bound(
        "PORTION_BYTES",
        "the rest of an answer waits until the client has read",
        "64 KiB of JSON, and 2 ms of the event loop",
        "tests/unit/router/openai/answers/test_json_parts.py::test_others_have_their_turn_between_portions_and_no_portion_is_large",
        place="router.openai.answers.json_parts",
    ),
)
