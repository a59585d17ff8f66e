"""Every message on every socket, and nothing else.

msgspec structs, frozen, tagged, one union a receiver, msgpack on the wire. Commands are imperatives, facts are
participles. Every message about a request carries `rid` and `attempt`; a message of an older attempt is dropped by its
receiver. Tokens only: text exists in the router alone.

A rolling upgrade mixes versions, and each reads what the other sends:

    a new field        gets a default and goes to the end (a `Row` is an array). Older readers ignore it.
    a new message      its reader names it in `Hello.understands`. It is sent to nobody who does not name it: the sender
                       asks `Hello.reads`, and otherwise does as it did before the message existed.
    a new value        of a closed set (`RefusalReason`), or a wider type: older readers refuse it. It needs a new field
                       or a new message instead.
    gone, renamed      never, within a protocol.

`tests/unit/links/test_wire.py` holds the bytes of every message and says how to change them.

A new message goes into the union of its receiver below, and into that receiver's `match`: `on_link` of the schedulers,
or `WorkerReplies` of the router, whose `EXPECTED` says in which states it may come. `make docs` then writes it into
docs/reference.md, and the simulation fails until it has sent it once. `UNDERSTOOD` names it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, get_args

import msgspec

from shared.wire.baton import Baton, Name, Numbers
from shared.wire.bounds import (
    Bits64,
    BytesPerSecond,
    Count,
    CountOrNone,
    ErrorStatus,
    PagesPerSecond,
    Seconds,
    TokenIds,
    TokensPerSecond,
)
from shared.wire.sampled import TokenLogprobs
from shared.wire.sampling_params import SamplingParams

PROTOCOL = 1
PROTOCOL_MESSAGES = frozenset(  # known to every version of this protocol: the set does not grow
    (
        "Cancel", "Closed", "Decode", "DrainAck", "Draining", "Finished", "Generated", "Heartbeat", "Hello", "Joined",
        "Load", "Migrate", "Migrating", "Prefill", "Prefilled", "Refused", "Release", "Renew",
    )
)  # fmt: skip

SCORES_MAX = 256  # in one message, so that no frame is large
FAILED_CHARACTERS_MAX = 1024  # of the sentence for a client
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]  # far more than there will be
WorkerRole = Literal["prefill", "decode"]
Role = Literal["router", "prefill", "decode"]
WORKER_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
FinishReason = Literal["length", "stop"]  # stop: an end-of-sequence or stop id; stop strings are the router's
RefusalReason = Literal["no_room", "stale", "too_long", "unreachable", "internal"]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base: the tag on the wire is the class's name."""


class Limits(msgspec.Struct, frozen=True):
    """What a worker can hold at all; the router refuses earlier what no worker could serve."""

    context_len: Count = 0  # tokens, prompt and output together
    page_size: Count = 0  # tokens
    pages: Count = 0
    slots: Count = 0  # requests at a time
    vocab_size: Count = 0
    extend_tokens: Count = 0  # of prompts that one step computes; 0 on a decode worker: it computes none


class Hello(Message, frozen=True, kw_only=True):
    """First on every link, both ways; a link without it carries nothing else."""

    session: Bits64  # drawn by the router for each connection, echoed by the worker
    role: Role
    uid: Name
    epoch: Bits64  # 64 random bits drawn at start: a restarted worker is a new worker
    protocol: Count = PROTOCOL
    model_name: Name = ""  # what clients call it
    model: Name = ""  # fingerprint: weights, dtype, tokenizer
    kv_format: Name = ""  # fingerprint: page size, layout, dtype, transfer protocol
    determinism: Name = ""  # fingerprint: kernels, ISA path, dtypes
    limits: Limits = Limits()
    eos_token_ids: TokenIds = ()  # a worker's end tokens, ascending; empty: not named
    # names of the messages beyond `PROTOCOL_MESSAGES` that its sender reads; the links fill it in
    understands: Names = ()
    features: Names = ()  # of sampling parameters, see `SamplingParams.features`

    def reads(self, message: type[Message]) -> bool:
        """Whether the version that sent this `Hello` knows such a message. Nothing else may be sent to it."""
        return message.__name__ in PROTOCOL_MESSAGES or message.__name__ in self.understands


class Heartbeat(Message, frozen=True):
    """Sent when a link was quiet for a heartbeat interval."""


class Closed(Message, frozen=True):
    """The last frame of a session: its sender has ended it and reads no more of it."""

    reason: str = ""


# ---- router to prefill -----------------------------------------------------------------------------------------


class Prefill(Message, frozen=True):
    """Compute the KV of `token_ids` and sample the next token."""

    rid: Name
    attempt: int
    token_ids: Numbers  # the prompt, then the tokens of earlier attempts
    prompt_len: int
    params: SamplingParams
    priority: int = 0
    extra_key: Name = ""  # keeps caches apart: adapters, tenants
    tenant: Name = ""  # opaque, the same from all routers; tenants share the worker fairly
    # the first tokens of the prompt, whose logprobs the router has if they were asked for
    scored_len: int = 0


class Renew(Message, frozen=True):
    """Keep the lease of this request; it ends `lease_seconds` after the last renewal."""

    rid: Name
    attempt: int


class Release(Message, frozen=True):
    """The pages have arrived elsewhere: end the lease."""

    rid: Name
    attempt: int


class Cancel(Message, frozen=True):
    """End this request, which is no longer wanted, whatever its state."""

    rid: Name
    attempt: int


# ---- router to decode ------------------------------------------------------------------------------------------


class Decode(Message, frozen=True):
    """Fetch the baton's pages and continue after the last of `token_ids` (whose own KV is not yet computed)."""

    rid: Name
    attempt: int
    token_ids: Numbers  # prompt and all tokens so far; baton.kv_len == len(token_ids) - 1
    prompt_len: int
    params: SamplingParams
    baton: Baton
    priority: int = 0
    extra_key: Name = ""
    tenant: Name = ""


class Serve(Message, frozen=True):
    """Compute the KV of `token_ids`, sample the next token and go on: the answer is a `Prefilled` without a baton."""

    rid: Name
    attempt: int
    token_ids: Numbers  # the prompt, then the tokens of earlier attempts
    prompt_len: int
    params: SamplingParams
    priority: int = 0
    extra_key: Name = ""
    tenant: Name = ""
    scored_len: int = 1  # as in `Prefill`


class Migrate(Message, frozen=True):
    """Another worker has room for this request: lease its pages, answer `Migrating`."""

    rid: Name
    attempt: int


class Foreseen(Message, frozen=True):
    """What this router has begun elsewhere and will send here, in pages; in place of what it said before.

    The worker's loads tell the others. Sent only where `Load.pages_foreseen` is told: then there are other routers.
    """

    pages: Count


class DrainAck(Message, frozen=True):
    """Answers `Draining`: this router sends nothing new. All that it sent before has already arrived."""


# ---- worker to router ------------------------------------------------------------------------------------------


class Prefilled(Message, frozen=True):
    """The first token of this attempt, and the baton.

    None when the request has ended with that token, or when the worker goes on with it by itself (`Serve`).
    """

    rid: Name
    attempt: Count
    index: Count  # of token_ids[0] in the output, across attempts
    token_ids: TokenIds
    baton: Baton | None
    finish: FinishReason | None = None
    cached_tokens: Count = 0
    queue_seconds: Seconds = 0.0
    compute_seconds: Seconds = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if they were asked for


class Scored(Message, frozen=True):
    """How likely some tokens of the prompt are, if that was asked for: all of them come before `Prefilled`."""

    rid: Name
    attempt: Count
    index: Count  # of the first of them in the prompt; the very first token of a prompt has no logprob
    logprobs: Annotated[tuple[TokenLogprobs, ...], msgspec.Meta(min_length=1, max_length=SCORES_MAX)]


class Joined(Message, frozen=True):
    """All reads are done and the lease held: the pages are this decode worker's own now."""

    rid: Name
    attempt: Count
    fetched_bytes: Count
    cached_tokens: Count
    fetch_seconds: Seconds
    transport: Name = ""  # of the link to the holder; empty: nothing fetched, or the link not measured
    # best of the last fetches of at least 1 MiB; 0: there was none
    link_bytes_per_second: BytesPerSecond = 0.0


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request. There are so many that the garbage collector had better not count them."""

    rid: Name
    attempt: Count
    index: Count  # of token_ids[0] in the output, across attempts
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if they were asked for


class Generated(Message, frozen=True):
    """The tokens of one step (or of a few, flushed together) for one router."""

    rows: tuple[Row, ...]


class Finished(Message, frozen=True):
    """The request has ended by itself with `output_len` tokens in all."""

    rid: Name
    attempt: Count
    output_len: Count
    reason: FinishReason
    retractions: Count = 0


class Migrating(Message, frozen=True):
    """The request runs here no more, with `output_len` tokens in all; the worker that fetches the pages continues."""

    rid: Name
    attempt: Count
    output_len: Count
    baton: Baton


class Draining(Message, frozen=True):
    """The worker accepts no new requests: it exits when it holds nothing, or after `drain_seconds`."""


class Refused(Message, frozen=True):
    """The worker does not take or keep this attempt, and holds nothing of it any more."""

    rid: Name
    attempt: Count
    reason: RefusalReason
    detail: str = ""


class Failed(Message, frozen=True):
    """The request ends by its own fault, as it would everywhere: it is not tried again. Nothing of it is held here."""

    rid: Name
    attempt: Count
    status: ErrorStatus  # of HTTP
    code: Name  # OpenAI's machine-readable word
    # for the client alone: it may quote what it sent
    message: Annotated[str, msgspec.Meta(max_length=FAILED_CHARACTERS_MAX)]


class Paused(Message, frozen=True):
    """The worker keeps the request, which does not run for now. Said at once, and every 5 s while it lasts."""

    rid: Name
    attempt: Count
    cause: Name  # retracted: its pages lie in host memory


class Load(Message, frozen=True):
    """How busy the worker is; pushed at most every 100 ms, when it changed."""

    queued: Count = 0  # requests waiting
    queued_tokens: Count = 0  # uncached tokens waiting to be computed
    running: Count = 0  # requests in slots
    running_tokens: Count = 0  # tokens held by running and arriving requests
    free_pages: Count = 0  # free or evictable
    slots_free: Count = 0
    accepting: bool = True
    pages_for_new: CountOrNone = -1  # of decode: beside the growth of all that are there; -1: not told
    pages_a_second: PagesPerSecond = 0.0  # … that those give back which end there
    # tokens of prompts that it computes, from a prompt's first token on, beside what decodes; 0: not known
    extend_rate: TokensPerSecond = 0.0
    position_seconds: Seconds = 0.0  # … that a token takes longer for each token before it
    step_seconds: Seconds = 0.0  # of a step that only decodes, with the rows of now
    pages_arriving: Count = 0  # of decode: that are being fetched
    pages_arriving_a_second: PagesPerSecond = 0.0  # … that its links bring, while they are busy; 0: not known
    extend_rate_alone: TokensPerSecond = 0.0  # of decode: `extend_rate` if nobody decoded
    slots_for_new: CountOrNone = -1  # of decode: beside those kept for tenants that hold little; -1: not told
    # of decode: for what the other routers have begun and not sent yet; -1: there is no other router, or it is not told
    pages_foreseen: CountOrNone = -1


RouterToPrefill = Hello | Heartbeat | Closed | Prefill | Renew | Release | Cancel | DrainAck
RouterToDecode = (
    Hello | Heartbeat | Closed | Decode | Serve | Migrate | Foreseen | Renew | Release | Cancel | DrainAck
)
RouterToWorker = RouterToPrefill | RouterToDecode
WorkerToRouter = (
    Hello
    | Heartbeat
    | Closed
    | Prefilled
    | Joined
    | Generated
    | Migrating
    | Finished
    | Refused
    | Load
    | Draining
    | Failed
    | Scored
    | Paused
)

encode = msgspec.msgpack.Encoder().encode
decode_from_router: Mapping[Role, Callable[[bytes], RouterToWorker]] = {  # by the role of the reader
    "prefill": msgspec.msgpack.Decoder(RouterToPrefill).decode,
    "decode": msgspec.msgpack.Decoder(RouterToDecode).decode,
}
decode_from_worker = msgspec.msgpack.Decoder(WorkerToRouter).decode


def _names(union: object) -> frozenset[str]:
    return frozenset(message.__name__ for message in get_args(union))


READABLE: Mapping[Role, frozenset[str]] = {  # the messages that a process of this version reads, by its role
    "prefill": _names(RouterToPrefill),
    "decode": _names(RouterToDecode),
    "router": _names(WorkerToRouter),
}
UNDERSTOOD: Mapping[Role, tuple[str, ...]] = {  # what it says of itself in its `Hello`
    role: tuple(sorted(names - PROTOCOL_MESSAGES)) for role, names in READABLE.items()
}
