"""The names that /v1/messages and /v1/responses have for the fields of a chat, which is what their requests become.

An error and the header of what is passed over name the field that the client sent. A place is renamed where it begins
a sentence, and nowhere else: what a sentence quotes is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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


def in_own_words(error: RequestError, endpoint: Endpoint) -> RequestError:
    """An error about a field of a chat, by the name that the endpoint has for it; see `RequestError.reworded`."""
    if not error.param:
        return error
    return error.reworded(own_place(error.message, endpoint), own_place(error.param, endpoint))
