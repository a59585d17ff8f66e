"""What a worker is sent of a request, as of now."""

from __future__ import annotations

from typing import TypeVar

from router.core.requests.live_request import LiveRequest
from shared.wire.messages import Decode, Prefill, Serve

Whole = TypeVar("Whole", Prefill, Serve)


def prompt_command(kind: type[Whole], live: LiveRequest) -> Whole:
    """Compute the prompt, and what earlier attempts have generated."""
    request = live.request
    return kind(
        rid=live.rid,
        attempt=live.attempt,
        token_ids=live.token_ids,
        prompt_len=len(request.token_ids),
        params=request.params,
        priority=request.priority,
        extra_key=live.extra_key,
        tenant=live.tenant.key,
        scored_len=live.scored_len,
    )


def decode_command(live: LiveRequest) -> Decode:
    """Fetch the pages that the baton names, and go on."""
    assert live.baton is not None, live.rid
    request = live.request
    return Decode(
        rid=live.rid,
        attempt=live.attempt,
        token_ids=live.token_ids,
        prompt_len=len(request.token_ids),
        params=request.params,
        baton=live.baton,
        priority=request.priority,
        extra_key=live.extra_key,
        tenant=live.tenant.key,
    )
