"""What a worker is sent of a request: its command, as of now."""

from __future__ import annotations

from router.core.requests.live_request import LiveRequest
from shared.wire.messages import Decode, Prefill


def prefill_command(live: LiveRequest) -> Prefill:
    """Compute the prompt, and what earlier attempts have generated."""
    request = live.request
    return Prefill(
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
