"""One line of the log for each request that asked for an answer, and one count for each HTTP answer.

The line is written when the HTTP request ends, whatever came of it, with the ids by which it is found elsewhere: its
own, the one that its client gave it, and the name of its API key. What the core knows of it is what `/debug` shows.
There is nothing in it of what clients wrote or models answered but that id, and not even that where it may be a key.
Requests that ask for less (models, health, tokens), and where there are keys all that are answered before a valid one
is found, have a line at debug: strangers can send them without end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.replies import SERVED_PATHS
from router.request_context import RequestContext
from shared.batch.effects import Note
from shared.primitives.metric_fields import CounterMetric, all_declared, counted_by_labels
from shared.process.api_keys import KEY_PREFIX
from shared.process.logs import is_written, write_note

ANSWERED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
OTHER_PATH = "other"
LOGGER = "router.openai"

Shown = dict[str, Any]  # what /debug shows of one request to the core


@all_declared
@dataclass(slots=True)
class HttpCounters:
    """Totals since the start. Paths are those that are served: what a client asks for else is `other`."""

    responses: Counter[tuple[str, ...]] = counted_by_labels(
        CounterMetric(
            "segue_http_responses_total",
            "HTTP answers that were begun, by the path that was asked for and the status. A stream that failed later "
            "has 200 here; segue_requests_total has its end.",
            ("path", "status"),
        ),
        *((path, "200") for path in sorted(ANSWERED_PATHS)),
    )

    def answered(self, path: str, status: int) -> None:
        """An answer begins."""
        self.responses[path if path in SERVED_PATHS else OTHER_PATH, str(status)] += 1


class RequestLog:
    """Writes the lines. `find` gives what the core knows of a request, live or lately ended."""

    def __init__(self, find: Callable[[str], Shown | None], *, keys_asked: bool):
        self._find = find
        self._keys_asked = keys_asked

    def write(self, context: RequestContext, path: str, status: int, seconds: float) -> None:
        """The HTTP request has ended, after so many seconds. A status of 0: its client had gone before an answer."""
        if not is_written("info"):
            return
        fields: dict[str, object] = {"rid": context.rid, "path": path, "status": status}
        if path not in ANSWERED_PATHS or (self._keys_asked and context.key is None):
            fields["path"] = path if path in SERVED_PATHS else OTHER_PATH
            write_note(
                Note("http.request", fields | {"milliseconds": _milliseconds(seconds)}, "debug"), LOGGER
            )
            return
        if context.client_id and KEY_PREFIX not in context.client_id:
            fields["client_id"] = context.client_id
        if context.key is not None:
            fields["key_name"] = context.key.name
        if context.code:
            fields["code"] = context.code
        fields["milliseconds"] = _milliseconds(seconds)
        if shown := [one for rid in context.core_rids if (one := self._find(rid)) is not None]:
            fields |= summary(shown)
        write_note(Note("request.answered", fields), LOGGER)


def summary(shown: list[Shown]) -> Shown:
    """What the core knows of all choices of one answer: sums, and the times of the one that took longest."""
    longest = max(shown, key=lambda one: sum(one["stage_milliseconds"].values()))
    outcomes = [one["outcome"] or one["state"] for one in shown]
    return {
        "outcome": outcomes[0] if len(set(outcomes)) == 1 else outcomes,
        "prompt_tokens": sum(one["charged_tokens"] for one in shown),
        "cached_tokens": sum(one["cached_tokens"] for one in shown),
        "completion_tokens": sum(one["completion_tokens"] for one in shown),
        "first_token_milliseconds": longest["first_token_milliseconds"],
        "stage_milliseconds": longest["stage_milliseconds"],
        "workers": list(dict.fromkeys(visit["worker"] for one in shown for visit in one["workers"])),
        "attempts": max(one["attempts"] for one in shown),
        "migrations": sum(one["migrations"] for one in shown),
        "retractions": sum(one["retractions"] for one in shown),
    } | ({"choices": len(shown)} if len(shown) > 1 else {})


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
