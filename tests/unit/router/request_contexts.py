"""A request's context where no client is connected."""

from __future__ import annotations

from collections.abc import Callable

from router.request_context import KEY, RequestContext


class NoConnection:
    """A connection of which nothing is asked."""

    def abort(self) -> None:
        raise AssertionError("abort")

    def watch_backlog(self, backlog_bytes: Callable[[], int]) -> None:
        raise AssertionError(f"watch_backlog {backlog_bytes()}")

    def show_key(self, name: str) -> None:
        raise AssertionError(f"show_key {name}")

    def count_refusal(self, status: int, full: str = "") -> None:
        raise AssertionError(f"count_refusal {status} {full}")


def scope_of(rid: str = "r", **given: object) -> dict[str, object]:
    """An ASGI scope with a context."""
    return {KEY: RequestContext(NoConnection(), rid=rid), **given}
