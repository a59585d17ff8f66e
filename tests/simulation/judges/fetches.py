"""The oracle for pages that a decode worker could not fetch although their holder is up: another one may try."""

from __future__ import annotations

from router.core.dispatch import RouterCore
from router.core.requests.lifecycle import RequestState
from router.core.requests.live_request import LiveRequest
from shared.wire.messages import Message, Refused


def first_unread(core: RouterCore, peer: str, message: Message) -> LiveRequest | None:
    """The request whose pages its worker could not fetch, before any other had tried; None: the message says less."""
    if not isinstance(message, Refused) or message.reason != "unreachable":
        return None
    live, worker = core._requests.live.get(message.rid), core.fleet.workers.get(peer)
    if live is None or worker is None or live.waits_on is not worker or live.attempt != message.attempt:
        return None
    may_be_read = live.state is RequestState.DECODING and not live.joined and live.holder is not None
    return live if may_be_read and not live.unread_by else None


def prove_kept(live: LiveRequest | None) -> bool:
    """The pages of such a request stay where they are, and it waits for another reader; returns whether it is one."""
    if live is None:
        return False
    assert live.state is RequestState.READY, f"{live.rid} is {live.state} behind the first fetch that failed"
    assert live.holder is not None, f"{live.rid} lost its pages with the first fetch that failed"
    return True
