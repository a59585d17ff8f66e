"""Whether a worker can act on a command at all: what is checked before a scheduler believes what a router sent.

A router checks what clients send, so a command that fails here comes from a router of another version, with another
model's tokenizer, or in other hands. It costs its own request and nothing else. What a worker has no room for is not
decided here.
"""

from __future__ import annotations

from shared.kv.page_pool import pages_for_tokens
from shared.primitives.errors import RequestError
from shared.wire.baton import Baton
from shared.wire.messages import Decode, Prefill, Serve
from shared.wire.sampling_params import validate

ADDRESS_MAX = 2**63  # bytes; no memory lies beyond
LEASES_MAX = 2**32  # words of one holder


def unsound(command: Prefill | Decode | Serve, vocab_size: int) -> str:
    """What is wrong with the tokens or the parameters; empty: nothing."""
    token_ids = command.token_ids
    if not 1 <= command.prompt_len <= len(token_ids):
        return f"a prompt of {command.prompt_len} tokens among {len(token_ids)}"
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"token ids from {min(token_ids)} to {max(token_ids)}; this model has 0 to {vocab_size - 1}"
    try:
        validate(command.params, vocab_size)
    except RequestError as error:
        return error.message
    return ""


def unsound_baton(baton: Baton, page_size: int) -> str:
    """What is wrong with a baton of this worker's KV format; empty: nothing."""
    pages, holder = baton.pages, baton.holder
    if len(pages) != pages_for_tokens(baton.kv_len, page_size):
        return f"the baton has {len(pages)} pages for {baton.kv_len} tokens"
    if min(pages, default=0) < 0 or not 0 <= baton.lease < LEASES_MAX or baton.nonce <= 0:
        return "the baton names a page, a lease or a nonce below the first one"
    if not holder.has_own_agent:
        return f"the baton's holder {holder.name} names the agent {holder.agent!r}, which is not its own"
    if holder.page_bytes <= 0 or min(holder.pages_address, holder.words_address, holder.device_id) < 0:
        return "the baton's holder has no memory"
    last_page = max(*pages, holder.known_page, 0, 0) + 1
    slice_bytes = holder.page_bytes // max(1, holder.slices)
    ends = [rank.pages_address + last_page * rank.slices * slice_bytes for rank in holder.ranks]
    if max(holder.pages_address + last_page * holder.page_bytes, holder.words_address, *ends) >= ADDRESS_MAX:
        return "the baton names memory beyond any address"
    return ""
