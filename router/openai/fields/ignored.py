"""What of a request is passed over, and where that is said: a header of its answer, and a line in the log.

    x-segue-ignored: mirostat_mode, tools[3], trace_label, and 2 more

The header is for the client that sent the request, so it has the client's own names, too, if they are plain words. The
log is for the operator: it has the names of this program's own tables, and how many others there were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import structlog

from router.openai.fields.states import Endpoint
from router.replies import Headers
from shared.primitives.errors import RequestError

log = structlog.get_logger(__name__)

HEADER = b"x-segue-ignored"
OWN_NAMES_MAX = 32  # in one header; with names of 64 characters it has 2.6 KB, and proxies take 4 KB of heads
CLIENT_NAMES_MAX = 8
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Ignored:
    """Names of what one request asks for and does not get, in the order in which they are found."""

    def __init__(self) -> None:
        self.chat_of: Endpoint = "chat"  # whose names the fields of a chat have, once it was read
        self._own: dict[str, None] = {}
        self._client: dict[str, None] = {}
        self._unnamed = 0

    def own(self, name: str) -> None:
        """Pass over a field that this program knows. `name` is this program's text, never the client's."""
        self._own[own_place(name, self.chat_of)] = None

    def client(self, name: str) -> None:
        """Pass over a field that nobody knows; one whose name is no plain word is counted alone."""
        if len(self._client) < CLIENT_NAMES_MAX and _PLAIN.fullmatch(name):
            self._client[name] = None
        elif name not in self._client:
            self._unnamed += 1

    @property
    def headers(self) -> Headers:
        """The header of the answer; none where all was served."""
        if not (self._own or self._client or self._unnamed):
            return []
        own = list(self._own)
        names = [*own[:OWN_NAMES_MAX], *self._client]
        more = len(own[OWN_NAMES_MAX:]) + self._unnamed
        if more:
            names.append(f"and {more} more" if names else f"{more} fields")
        return [(HEADER, ", ".join(names).encode("ascii"))]

    def log(self, rid: str) -> None:
        """One line at info, if anything was passed over."""
        if self._own or self._client or self._unnamed:
            others = len(self._client) + self._unnamed
            log.info("request.ignored", rid=rid, names=list(self._own)[:OWN_NAMES_MAX], others=others)


# ---- The names that /v1/messages and /v1/responses have for the fields of a chat, which is what their requests become
# An error and the header of what is passed over name the field that the client sent. A place is renamed where it begins
# a sentence, and nowhere else: what a sentence quotes is the client's.


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
