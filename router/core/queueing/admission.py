"""Admission of requests to a router: refuses those that no worker could serve, and those that find the queue full.

A pure function of a request and the fleet. It does not ask for what only a worker knows, such as a pool that is full.
"""

from __future__ import annotations

import math

from router.config import RouterConfig
from router.core.effects import ClientRequest, RequestFailed
from router.core.fleet.workers import Fleet
from router.core.requests.tenants import Tenant
from shared.scheduling.tenant_shares import share_of
from shared.wire.messages import WORKER_ROLES

WAIT_FRACTION = 0.8  # of what a new request may wait: a wait that is foreseen may become longer
TARGET_FRACTION = 0.5  # of a target, which is short: so the error of what is foreseen is a larger part of it


def refusal(
    request: ClientRequest, fleet: Fleet, waiting: int, settings: RouterConfig
) -> RequestFailed | None:
    """Why a request is not admitted, while `waiting` others wait; None if it is admitted."""
    if request.model not in fleet.models:
        message = f"The model {request.model!r} does not exist."
        return RequestFailed(404, message, code="model_not_found", param="model")
    if not request.token_ids:
        return RequestFailed(400, "The prompt is empty; send at least one token.", param="prompt")
    if waiting >= settings.max_queued_requests:
        return _full(fleet, settings)
    return _unserved(request, fleet) or _too_long(request, fleet)


def tenant_refusal(
    request: ClientRequest, tenant: Tenant, settings: RouterConfig, now: float
) -> RequestFailed | None:
    """Why a request is not admitted because of its tenant; None if it is admitted. `now` in seconds."""
    share = share_of(settings.max_queued_requests, settings.tenant_share_max)
    waiting_max = min(settings.tenant_waiting_max or share, share)
    if tenant.waiting >= waiting_max:
        message = f"{waiting_max} requests of this client wait already. Try again later."
        return RequestFailed(429, message, settings.retry_after_seconds, code="tenant_queue_full")
    seconds = tenant.seconds_until(request.charged_tokens, now)
    if seconds > 0:
        per_minute = settings.tenant_tokens_per_minute
        message = (
            f"This client has used its {per_minute} tokens per minute. Try again in {math.ceil(seconds)} s."
        )
        return RequestFailed(429, message, seconds, code="tokens_per_minute")
    return None


def wait_refusal(seconds: float, settings: RouterConfig) -> RequestFailed | None:
    """Why a request that would wait so many seconds before prefill is not admitted; None if it is admitted."""
    seconds_max = settings.waiting_seconds_max * WAIT_FRACTION
    if seconds <= seconds_max:
        return None
    retry = min(max(settings.retry_after_seconds, seconds - seconds_max), settings.waiting_seconds_max)
    message = (
        f"So many requests wait that this one would wait longer than {seconds_max:g} s. Try again later."
    )
    return RequestFailed(429, message, retry, code="wait_too_long")


def target_of(request: ClientRequest, settings: RouterConfig) -> float:
    """Seconds from arrival to the first token: the least of the deployment's, the key's and the request's; 0.0: any."""
    return min(
        (each for each in (settings.ttft_target_seconds, request.deadline_seconds) if each > 0), default=0.0
    )


def target_refusal(seconds: float, target_seconds: float, settings: RouterConfig) -> RequestFailed | None:
    """Why a request whose first token is foreseen in so many seconds is not admitted; None if it is admitted."""
    if not target_seconds or seconds <= target_seconds * TARGET_FRACTION:
        return None
    retry = min(max(settings.retry_after_seconds, seconds - target_seconds), settings.waiting_seconds_max)
    message = (
        f"So many requests wait that this one would not have its first token within {target_seconds:g} s. "
        "Try again later."
    )
    return RequestFailed(429, message, retry, code="target_missed")


def _full(fleet: Fleet, settings: RouterConfig) -> RequestFailed:
    """Too many clients are a 429; a fleet that cannot serve even one is a 503, and no client's fault."""
    retry = settings.retry_after_seconds
    missing = next((role for role in fleet.missing if not fleet.of_role(role)), None)
    if missing is None:
        message = f"The queue of this router is full ({settings.max_queued_requests} requests wait). Try again later."
        return RequestFailed(429, message, retry, code="queue_full")
    waiting_max = settings.max_queued_requests
    message = f"There is no {missing} worker, and {waiting_max} requests wait for one. Try again later."
    return RequestFailed(503, message, retry, code="no_worker")


def _unserved(request: ClientRequest, fleet: Fleet) -> RequestFailed | None:
    """Sampling that no worker of a role knows: waiting would not help."""
    asked = request.params.features
    for role in WORKER_ROLES if asked else ():
        serving = [*fleet.of_role(role)]
        if role == "prefill" and serving:
            serving += filter(fleet.serves_whole, fleet.of_role("decode"))
        known = [worker.features for worker in serving]
        if known and not any(asked <= features for features in known):
            missing = sorted(asked - frozenset.union(*known)) or sorted(asked)
            message = f"The {role} workers of this deployment do not serve {', '.join(missing)}."
            return RequestFailed(400, message, code="not_served")
    return None


def _too_long(request: ClientRequest, fleet: Fleet) -> RequestFailed | None:
    prompt, output = len(request.token_ids), request.params.max_new_tokens
    context = fleet.context_len(request.model)
    held = fleet.prompt_len_max(request.model)
    if context is not None and prompt + output > context:
        message = (
            f"This model's context is {context} tokens, but the request takes {prompt + output}: "
            f"{prompt} of the prompt and {output} of output. Shorten one of them."
        )
        return RequestFailed(400, message, code="context_length_exceeded")
    if held is not None and prompt > held:
        message = f"The prompt has {prompt} tokens, but the largest prefill worker holds {held}. Shorten it."
        return RequestFailed(400, message, code="context_length_exceeded")
    return None


# ---- the answer to a request whose time is over ----------------------------------------------------------------------


def timed_out(
    kind: str, waited_seconds: float, target_seconds: float, fleet: Fleet, settings: RouterConfig
) -> RequestFailed:
    """The answer; `kind` is `request`, `gone`, `wait` or `target`, and it has waited so long in its state."""
    retry = settings.retry_after_seconds
    if kind == "request":
        message = f"The request took longer than {settings.request_seconds_max:g} s."
        return RequestFailed(504, message, code="request_timeout")
    if kind == "gone":
        seconds = settings.worker_return_seconds
        message = f"For {seconds:g} s there was no worker that could continue the stream. Try again later."
        return RequestFailed(503, message, retry, code="no_worker")
    if kind == "target":
        message = (
            f"The request was not computed within {target_seconds:g} s, in which its first token was to come."
        )
        return RequestFailed(503, message, retry, code="target_missed")
    missing = " or ".join(fleet.missing)
    why = f"There was no {missing} worker for" if missing else "No worker took the request within"
    return RequestFailed(503, f"{why} {waited_seconds:g} s. Try again later.", retry, code="no_worker")
