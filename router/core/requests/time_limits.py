"""What a request is answered whose time is over, by the limit that it met."""

from __future__ import annotations

from router.config import RouterConfig
from router.core.effects import RequestFailed
from router.core.fleet.workers import Fleet


def timed_out(kind: str, waited_seconds: float, fleet: Fleet, settings: RouterConfig) -> RequestFailed:
    """The answer; `kind` is `request`, `ready` or `wait`, and it has waited so long in its state."""
    retry = settings.retry_after_seconds
    if kind == "request":
        message = f"The request took longer than {settings.request_seconds_max:g} s."
        return RequestFailed(504, message, code="request_timeout")
    if kind == "ready":
        message = f"No decode worker had room within {settings.ready_seconds_max:g} s. Try again later."
        return RequestFailed(503, message, retry, code="no_worker")
    missing = " or ".join(fleet.missing)
    why = f"There was no {missing} worker for" if missing else "No worker took the request within"
    return RequestFailed(503, f"{why} {waited_seconds:g} s. Try again later.", retry, code="no_worker")
