"""An error names a field as the path's API does, and leaves as it is what it quotes of the client's."""

from __future__ import annotations

import pytest

from router.openai.fields.own_words import in_own_words, own_place
from router.openai.fields.states import Endpoint
from router.replies import OverloadedError
from shared.primitives.errors import RequestError

PLACES: dict[str, tuple[Endpoint, str, str]] = {
    "a format": ("messages", "response_format.json_schema must be", "output_config.format must be"),
    "a keyword of a format": ("responses", "response_format.not", "text.format.not"),
    "a schema": ("messages", "tools[3].function.parameters.x", "tools[3].input_schema.x"),
    "a tool": ("messages", "tools[3].function.name", "tools[3].name"),
    "a message": ("responses", "messages[0].content", "input[0].content"),
    "a longer word": ("messages", "stopwatch is", "stopwatch is"),
    "a name within": ("messages", "tools[0].stop", "tools[0].stop"),
    "a chat": ("chat", "response_format.json_schema", "response_format.json_schema"),
}


@pytest.mark.parametrize(("endpoint", "place", "own"), PLACES.values(), ids=PLACES)
def test_a_place_is_renamed_where_it_begins(endpoint: Endpoint, place: str, own: str) -> None:
    assert own_place(place, endpoint) == own


def test_what_an_error_quotes_is_the_clients() -> None:
    quoted = 'cannot be kept to: "stopwatch.function.response_format" has messages'
    error = in_own_words(RequestError(f"response_format {quoted}", param="response_format"), "messages")
    assert (str(error), error.param) == (f"output_config.format {quoted}", "output_config.format")
    error = in_own_words(RequestError("the key has no stop", param="stop"), "messages")
    assert (error.message, error.param) == ("the key has no stop", "stop_sequences")
    error = in_own_words(RequestError("messages of stop", status=404), "responses")
    assert (error.message, error.status) == ("messages of stop", 404)


def test_an_error_keeps_all_that_it_has() -> None:
    sent = OverloadedError("stop", retry_after_seconds=31)
    sent.param = "stop"
    words: dict[Endpoint, str] = {"messages": "stop_sequences", "responses": "stop"}
    for endpoint, word in words.items():
        error = in_own_words(sent, endpoint)
        assert isinstance(error, OverloadedError)
        assert (error.status, error.retry_after_seconds, str(error), error.param) == (429, 31, word, word)
    assert (sent.message, sent.param) == ("stop", "stop"), "the error that is reworded stays as it was"
