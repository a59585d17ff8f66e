"""What the parts of the router know of one HTTP request beside what its client has sent.

The connection makes it and puts it into the ASGI scope under one key, because ASGI hands on nothing but the scope.
Those that the request passes write what they find out, each its own fields. `context_of` is the one way to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

from router.core.effects import ClientRequest
from router.shell import TokenSink
from shared.process.api_keys import ApiKey

KEY = "segue.context"  # in the scope


class Connection(Protocol):
    """The client's connection, as the application sees it."""

    def abort(self) -> None:
        """Drop the connection with its unread data."""

    def watch_backlog(self, backlog_bytes: Callable[[], int]) -> None:
        """Count what an answer keeps until it can be written."""

    def show_key(self, name: str) -> None:
        """Tell that the request has a valid API key, of this name."""

    def count_refusal(self, status: int) -> None:
        """Count a request that never reaches the core, which counts the others."""


class Account(Protocol):
    """Who pays for a request: see `router.access.keyed_clients`."""

    def reserve(self, requests: Sequence[ClientRequest], now: float) -> None: ...

    def metered(self, request: ClientRequest, sink: TokenSink) -> tuple[ClientRequest, TokenSink]: ...


@dataclass(slots=True)
class RequestContext:
    """One HTTP request on its way through the router."""

    connection: Connection
    rid: str = ""  # drawn by `RequestIdMiddleware`, which is the first to see the request
    key: ApiKey | None = None  # both by `KeyGuard`, once it lets the request in; None: there are no keys
    account: Account | None = None


def context_of(scope: Scope) -> RequestContext:
    """The context of a request."""
    context: RequestContext = scope[KEY]
    return context
