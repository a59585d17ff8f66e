"""Somebody who watches a router: reads its events over a socket, as far as a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

Event = tuple[str, Any]


class Events:
    """The events of one watcher, in order."""

    def __init__(self, answer: httpx2.Response):
        self.text = ""
        self.status = answer.status_code
        self._lines = answer.iter_lines()

    def until(self, kind: str, **fields: object) -> Any:
        """The next event of this kind with these fields; those before it are passed over."""
        name = ""
        for line in self._lines:
            self.text += f"{line}\n"
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == kind:
                data = json.loads(line.removeprefix("data: "))
                if all(data[field] == value for field, value in fields.items()):
                    return data
        raise AssertionError(f"the stream has ended without {kind} {fields}; it was {self.text}")

    def to_the_end(self) -> None:
        """Read until the router ends the stream."""
        for line in self._lines:
            self.text += f"{line}\n"


@contextmanager
def watching(url: str, source: str = "127.0.0.1", **headers: str) -> Iterator[Events]:
    """Watch this router from this address."""
    with (
        httpx2.Client(
            timeout=20, transport=httpx2.HTTPTransport(verify=False, local_address=source)
        ) as client,
        client.stream("GET", f"{url}/live/events", headers=headers) as answer,
    ):
        yield Events(answer)
