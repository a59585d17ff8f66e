"""The names that /v1/messages and /v1/responses have for the fields of a chat, which is what their requests become.

An error and the header of what is passed over name the field that the client sent. A place is renamed where it begins
a sentence, and nowhere else: what a sentence quotes is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from router.openai.fields.states import Endpoint
from shared.primitives.errors import RequestError

_PLACES: Mapping[Endpoint, Mapping[str, str]] = {  # the first that matches is taken
    "messages": {
        r"stop": "stop_sequences",
        r"reasoning_effort": "output_config.effort",
        r"response_format(\.json_schema)?": "output_config.format",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
    },
    "responses": {
        r"max_completion_tokens": "max_output_tokens",
        r"messages": "input",
        r"reasoning_effort": "reasoning.effort",
        r"response_format(\.json_schema)?": "text.format",
    },
}
_PATTERNS = {
    endpoint: [(re.compile(rf"{place}(?!\w)"), own) for place, own in places.items()]
    for endpoint, places in _PLACES.items()
}


def own_place(text: str, endpoint: Endpoint) -> str:
    """A place in a chat, or a sentence that begins with one, with the name that the endpoint has for it."""
    for pattern, own in _PATTERNS.get(endpoint, ()):
        if found := pattern.match(text):
            return found.expand(own) + text[found.end() :]
    return text


@contextmanager
def errors_in_words_of(endpoint: Endpoint) -> Iterator[None]:
    """Rename the field of a chat that an error is about; see `RequestError.reworded`."""
    try:
        yield
    except RequestError as error:
        if not error.param:
            raise
        message, param = own_place(error.message, endpoint), own_place(error.param, endpoint)
        raise error.reworded(message, param) from None
