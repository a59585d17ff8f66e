"""Whether a baton can be what its sender says: a router passes it to another worker, which reads where it points.

A worker that names another holder, or another request's pages, would make decode workers connect to addresses of its
choice, or blame others for pages that cannot be read; one that names another's agent would be taken for that one. Where
a worker listens it says itself, in the metadata of its first baton: a router keeps to that for the session. It may
well be another interface than the one that was dialed. What a baton says of memory (addresses, lease, nonce) only its
holder knows; the worker that reads checks that it is within bounds (`shared.scheduling.sound_commands`).
"""

from __future__ import annotations

from router.core.fleet.workers import Worker
from router.core.requests.live_request import LiveRequest
from shared.kv.page_pool import pages_for_tokens
from shared.wire.baton import Baton

METADATA_BYTES_MAX = (
    64 << 10
)  # of all ranks; those of NIXL have about 1 KiB, and a router keeps one of each worker


def unsound_baton(baton: Baton, live: LiveRequest, sender: Worker, output_len: int) -> str:
    """What is wrong with a baton that `sender` gives out for a request with `output_len` tokens; empty: nothing."""
    hello, holder = sender.hello, baton.holder
    if (holder.uid, holder.epoch) != (hello.uid, hello.epoch):
        return f"names the holder {holder.name}"
    if not holder.has_own_agent:
        return f"names the agent {holder.agent} of another holder"
    if holder.metadata_bytes > METADATA_BYTES_MAX:
        return f"has KV metadata of {holder.metadata_bytes} bytes, more than {METADATA_BYTES_MAX}"
    if sender.kv_metadata is not None and holder.metadata != sender.kv_metadata:
        return "has other KV metadata than this worker's first baton"
    if (baton.rid, baton.attempt) != (live.rid, live.attempt):
        return f"is of attempt {baton.attempt} of request {baton.rid}"
    if baton.kv_format != hello.kv_format:
        return f"has the KV format {baton.kv_format}"
    prompt_len = len(live.request.token_ids)
    kv_len = prompt_len + output_len - 1  # the KV of the last token is not computed
    if (baton.prompt_len, baton.kv_len) != (prompt_len, kv_len):
        return f"is of {baton.kv_len} tokens behind a prompt of {baton.prompt_len}, not {kv_len} and {prompt_len}"
    page_size = hello.limits.page_size
    if page_size and len(baton.pages) != pages_for_tokens(kv_len, page_size):
        return f"has {len(baton.pages)} pages for {kv_len} tokens"
    return ""
