"""An error in another API's words is the same error: its status, code and Retry-After are those of a chat."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.http.messages.fields import in_messages_words
from router.http.replies import OverloadedError
from router.http.responses_fields import in_responses_words
from shared.errors import RequestError


@pytest.mark.parametrize("reword", [in_messages_words, in_responses_words])
def test_an_overload_says_when_to_come_again(reword: Callable[[RequestError], RequestError]) -> None:
    error = reword(OverloadedError("the queue is full", 31.0))
    assert isinstance(error, OverloadedError)
    assert (error.status, error.retry_after_seconds, str(error)) == (429, 31.0, "the queue is full")


def test_the_error_that_is_reworded_stays_as_it_was() -> None:
    error = RequestError("stop is too long", status=400, param="stop", code="too_long")
    other = in_messages_words(error)
    assert (other.message, other.param, other.code) == (
        "stop_sequences is too long",
        "stop_sequences",
        "too_long",
    )
    assert (error.message, error.param) == ("stop is too long", "stop")
