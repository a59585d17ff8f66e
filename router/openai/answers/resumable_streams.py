"""Streams that a client can resume, at any router, and requests that it may send twice.

    X-Segue-Resumable: true     events get ids (`StreamIds`); a stream without it is as OpenAI's, to the byte
    Last-Event-ID: <id>         the same body once more: the stream goes on behind the event with this id
    Idempotency-Key: <key>      without a seed in the body, the seed is made of the key: the same answer each time

Nothing of a stream is kept. It is computed again with the same seed, and what the client has is left out. That is exact
because sampling is a pure function, and it costs what the answer costs: the prompt is probably cached, the tokens up to
the event are not. A deployment that computes otherwise than the one that wrote the id refuses it (409).

Text is counted in ids, and thoughts and calls of tools. What is reported of single tokens, as logprobs, is not: a
stream that has it is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.types import Scope

from router.openai.answers.response_stream import TextDelta
from router.parsers.answer_deltas import NAMES, AnswerDelta
from router.request_context import context_of
from shared.primitives.errors import RequestError
from shared.primitives.holders import Holders
from shared.primitives.metric_fields import all_declared, total
from shared.process.api_keys import ApiKey

IDEMPOTENCY_KEY_CHARS_MAX = 255
IDEMPOTENCY_KEYS_MAX = 10_000  # for `IDEMPOTENCY_SECONDS`, about 5 MB; who has most forgets its oldest
IDEMPOTENCY_SECONDS = 600.0
DIGEST_BYTES = 16
RESUMABLE_CHOICES_MAX = 64  # of a stream with ids: each event names the place in each


@all_declared
@dataclass(slots=True)
class ResumingCounters:
    """Totals since the start."""

    resumed: int = total("segue_streams_resumed_total", "Streams that went on behind a Last-Event-ID.")
    repeated: int = total(
        "segue_requests_repeated_total", "Requests with an Idempotency-Key that had come here before."
    )


@dataclass(frozen=True, slots=True)
class StreamHeaders:
    """What the headers of a request ask for, and in the name of which API key."""

    key_name: str
    resumable: bool = False
    last_event_id: str | None = None
    idempotency_key: str | None = None

    @property
    def asks(self) -> bool:
        """Whether they ask for anything."""
        return self.resumable or self.last_event_id is not None or self.idempotency_key is not None


def read_stream_headers(scope: Scope, key: ApiKey | None) -> StreamHeaders:
    """Raises `RequestError` for one that is wrong."""
    found = {name: value for name, value in scope["headers"] if name in _HEADERS}
    if not found:
        return StreamHeaders(key.name if key else "")
    resumable = found.get(b"x-segue-resumable", b"false").strip().lower()
    if resumable not in (b"true", b"false"):
        raise RequestError("X-Segue-Resumable must be true or false")
    last, idempotency = found.get(b"last-event-id"), found.get(b"idempotency-key")
    if idempotency is not None and not 1 <= len(idempotency) <= IDEMPOTENCY_KEY_CHARS_MAX:
        raise RequestError(f"Idempotency-Key must have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters")
    return StreamHeaders(
        key.name if key else "",
        resumable == b"true",
        None if last is None else last.decode("latin-1"),
        None if idempotency is None else idempotency.decode("latin-1"),
    )


_HEADERS = (b"x-segue-resumable", b"last-event-id", b"idempotency-key")


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How to compute an answer so that it can be computed again, and what of it the client has."""

    seed: int | None = None  # None: what the body says
    ticket: StreamTicket | None = None  # None: events get no ids
    signed_ticket: str = ""
    places: tuple[ChoicePlace, ...] = ()
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """The request that came with an Idempotency-Key."""

    request: bytes  # its digest
    tenant: str
    at: float  # seconds


class Resuming:
    """Resumable streams of one router. `plan` may be called on any thread, `remember` on the event loop's."""

    def __init__(self, link_secret: bytes):
        self.counters = ResumingCounters()
        self._ids = StreamIds(link_secret)
        self._idempotent: dict[bytes, _Remembered] = {}  # by key, oldest first
        self._of_tenants: Holders[bytes] = Holders()  # the same keys

    def plan(
        self,
        headers: StreamHeaders,
        rid: str,
        digest: bytes,
        seed: int | None,
        fingerprint: str,
        *,
        stream: bool,
    ) -> StreamPlan:
        """What the headers ask for. `seed` and `stream` are the body's. Raises `RequestError`."""
        if seed is None and headers.idempotency_key is not None:
            seed = _seed_of(headers.key_name, headers.idempotency_key)
        if not headers.resumable and headers.last_event_id is None:
            return StreamPlan(seed=seed, digest=digest)
        if not stream:
            raise RequestError("only a stream can be resumed: send stream: true", param="stream")
        if headers.last_event_id is not None:
            return self._resumed(headers.last_event_id, digest, fingerprint)
        seed = secrets.randbits(63) if seed is None else seed
        ticket = StreamTicket(rid, int(time.time()), seed, digest, fingerprint)
        return StreamPlan(seed, ticket, self._ids.signed(ticket), (), digest)

    def _resumed(self, last_event_id: str, digest: bytes, fingerprint: str) -> StreamPlan:
        ticket, places = self._ids.read(last_event_id)
        if ticket.request != digest:
            raise RequestError(
                "Last-Event-ID is of another request: send the same body to the same path, with the same API key",
                status=422,
                code="another_request",
            )
        if ticket.fingerprint != fingerprint:
            raise RequestError(
                "the stream cannot be resumed: what computes now may give another text; begin a new one",
                status=409,
                code="stream_not_resumable",
            )
        return StreamPlan(ticket.seed, ticket, self._ids.signed(ticket), tuple(places), digest)

    def remember(self, headers: StreamHeaders, tenant: str, plan: StreamPlan, now: float) -> None:
        """Raises `RequestError` (422) where the same Idempotency-Key came with another request. `now` in seconds."""
        if headers.last_event_id is not None:
            self.counters.resumed += 1
        if headers.idempotency_key is None:
            return
        while self._idempotent and (oldest := next(iter(self._idempotent))):
            if now - self._idempotent[oldest].at < IDEMPOTENCY_SECONDS:
                break
            self._forget(oldest)
        name = _digest(tenant.encode(), headers.idempotency_key.encode("latin-1"))
        before = self._idempotent.get(name)
        if before is None:
            if len(self._idempotent) >= IDEMPOTENCY_KEYS_MAX and (most := self._of_tenants.oldest_of_most()):
                self._forget(most)
            self._idempotent[name] = _Remembered(plan.digest, tenant, now)
            self._of_tenants.add(tenant, name)
            return
        if before.request != plan.digest:
            raise RequestError(
                "this Idempotency-Key came with another request before: take a new key for each request",
                status=422,
                code="idempotency_key_reused",
            )
        self.counters.repeated += 1

    def _forget(self, name: bytes) -> None:
        self._of_tenants.discard(self._idempotent.pop(name).tenant, name)


class AskedStream:
    """What the headers of one request ask for, and from when its body is read, how it is met."""

    def __init__(self, resuming: Resuming, scope: Scope, fingerprint: str):
        """Raises `RequestError` for a header that is wrong."""
        self.plan = StreamPlan()
        context = context_of(scope)
        self._headers = read_stream_headers(scope, context.key)
        self._resuming = resuming
        self._path = str(scope["path"])
        self._rid = context.rid
        self._fingerprint = fingerprint

    def seed_for(self, body: bytes | bytearray, seed: int | None, *, stream: bool) -> int | None:
        """The seed to use for a body that says `seed`; None: any. Raises `RequestError`. On any thread."""
        headers = self._headers
        if headers.asks:
            digest = _digest(self._path.encode(), headers.key_name.encode(), body)
            self.plan = self._resuming.plan(
                headers, self._rid, digest, seed, self._fingerprint, stream=stream
            )
            return self.plan.seed
        return seed

    def begin(self, tenant: str, choices: int, *, tells_of_tokens: bool, now: float) -> StreamMarks | None:
        """The marks of its events; None: no ids. Raises `RequestError`. On the event loop; `now` in seconds."""
        if self.plan.ticket is not None and tells_of_tokens:
            raise RequestError(
                "a stream that tells of single tokens cannot be resumed: leave out X-Segue-Resumable, or logprobs,"
                " return_token_ids and echo"
            )
        marks = stream_marks(self.plan, choices)
        self._resuming.remember(self._headers, tenant, self.plan, now)
        return marks


@dataclass(slots=True)
class StreamMarks:
    """The ids of the events of one stream; it leaves out what the client has."""

    signed_ticket: str
    had: Sequence[ChoicePlace]  # of each choice
    _places: list[ChoicePlace] = field(init=False)  # what the client has after the events so far
    _computed: list[ChoicePlace] = field(init=False)  # how much of each choice was computed so far

    def __post_init__(self) -> None:
        self._places = list(self.had)
        self._computed = [ChoicePlace(0)] * len(self.had)

    def has_opening(self, index: int) -> bool:
        """Whether the client has the first event of a choice, which may hold no text."""
        return self.had[index].chars is not None

    def opened(self, index: int) -> bytes:
        """The id of the event that opens a choice."""
        self._places[index] = ChoicePlace(0)
        return self._line()

    def unread(self, piece: TextDelta) -> TextDelta | None:
        """What the client does not have of a piece; None: it has all of it."""
        had, begin = self.had[piece.index], self._computed[piece.index]
        self._computed[piece.index] = ChoicePlace(
            (begin.chars or 0) + len(piece.text),
            piece.finish_reason is not None,
            begin.thoughts + len(piece.reasoning),
            begin.calls + sum(_size(call) for call in piece.calls),
        )
        if had.finished:
            return None
        rest = replace(
            piece,
            text=piece.text[max(0, (had.chars or 0) - (begin.chars or 0)) :],
            reasoning=piece.reasoning[max(0, had.thoughts - begin.thoughts) :],
            calls=_behind(piece.calls, had.calls - begin.calls),
        )
        return rest if rest.text or rest.reasoning or rest.calls or rest.finish_reason else None

    def written(self, piece: TextDelta) -> bytes:
        """The id of the event that holds what `unread` left of a piece."""
        had, computed = self.had[piece.index], self._computed[piece.index]
        self._places[piece.index] = ChoicePlace(
            max(computed.chars or 0, had.chars or 0),
            computed.finished,
            max(computed.thoughts, had.thoughts),
            max(computed.calls, had.calls),
        )
        return self._line()

    def _line(self) -> bytes:
        return f"id: {event_id(self._places, self.signed_ticket)}\n".encode()


def _size(part: AnswerDelta) -> int:
    """The name of a tool comes whole; its arguments may be cut anywhere."""
    return 1 if part.kind in NAMES else len(part.text)


def _behind(parts: Sequence[AnswerDelta], had: int) -> tuple[AnswerDelta, ...]:
    """What is left of the parts of calls behind the first `had`, as `_size` counts them."""
    left = []
    for part in parts:
        size = _size(part)
        if had <= 0:
            left.append(part)
        elif had < size:
            left.append(replace(part, text=part.text[had:]))
        had -= size
    return tuple(left)


def stream_marks(plan: StreamPlan, choices: int) -> StreamMarks | None:
    """The marks of a stream of so many choices; None: its events get no ids. Raises `RequestError`."""
    if plan.ticket is None:
        return None
    if choices > RESUMABLE_CHOICES_MAX:
        raise RequestError(
            f"a stream with ids has at most {RESUMABLE_CHOICES_MAX} choices, got {choices}", param="n"
        )
    if plan.places and len(plan.places) != choices:
        raise RequestError("Last-Event-ID is of another request", status=422, code="another_request")
    return StreamMarks(plan.signed_ticket, plan.places or (ChoicePlace(),) * choices)


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


def _seed_of(key_name: str, idempotency_key: str) -> int:
    return int.from_bytes(_digest(key_name.encode(), idempotency_key.encode("latin-1"))[:8]) >> 1


# ---- ids of the events of a stream: how much of it a client has, and a signed ticket that tells any router the rest --
#     id: 120r30,95f.kpKyZjEyZTMxZWM…
#         │      │  └ the ticket: whose answer it is, its seed, and the digest of the request; the same in all events
#         │      └ 95 characters of the second choice, which is finished
#         └ 120 characters of the first choice, and 30 of its thoughts; c4 would be so much of its calls of tools
#
# Routers of a deployment have one key pair, so each can read the tickets of the others, and nobody else can write one.
# Nothing is stored. A place is counted in characters of the text, and not in events: how tokens fall together into
# events differs from run to run.


EVENT_ID_CHARS_MAX = 4096
MAC_BYTES = 16

_PLACE = re.compile(r"(?:(\d{1,9})(?:r(\d{1,9}))?(?:c(\d{1,9}))?)?(f?)")


class StreamTicket(msgspec.Struct, frozen=True, array_like=True):
    """What another router needs to know of a stream to write the same one."""

    rid: str  # of the HTTP request that began it: its answer is called so
    created: int  # seconds since 1970
    seed: int
    request: bytes  # digest of path, API key's name and body
    fingerprint: str  # of what computes: equal as long as the same seed gives the same output


@dataclass(frozen=True, slots=True)
class ChoicePlace:
    """How much of a choice a client has; `chars` None: not even its first event.

    `thoughts` are characters as well. `calls` are the characters of their arguments, and one for each name of a tool.
    """

    chars: int | None = None
    finished: bool = False
    thoughts: int = 0
    calls: int = 0

    def __str__(self) -> str:
        rest = f"{f'r{self.thoughts}' if self.thoughts else ''}{f'c{self.calls}' if self.calls else ''}"
        return f"{'' if self.chars is None else self.chars}{rest}{'f' if self.finished else ''}"


class StreamIds:
    """Writes and reads tickets. `link_secret` is what all routers of a deployment have, and nobody else."""

    def __init__(self, link_secret: bytes):
        self._key = hashlib.blake2b(b"ids of streams", key=link_secret[:64], digest_size=32).digest()

    def signed(self, ticket: StreamTicket) -> str:
        """The ticket as it stands in ids."""
        packed = msgspec.msgpack.encode(ticket)
        return base64.urlsafe_b64encode(self._mac(packed) + packed).rstrip(b"=").decode()

    def read(self, event_id: str) -> tuple[StreamTicket, list[ChoicePlace]]:
        """Ticket and places of an id. Raises `RequestError` (400) for one that no router here has written."""
        places, dot, text = event_id.partition(".")
        if not dot or len(event_id) > EVENT_ID_CHARS_MAX:
            raise _unknown()
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            raise _unknown() from None
        mac, packed = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(packed)):
            raise _unknown()
        try:
            ticket = msgspec.msgpack.decode(packed, type=StreamTicket)
        except msgspec.DecodeError:  # of another version
            raise _unknown() from None
        return ticket, [_place(each) for each in places.split(",")]

    def _mac(self, packed: bytes) -> bytes:
        return hashlib.blake2b(packed, key=self._key, digest_size=MAC_BYTES).digest()


def event_id(places: Sequence[ChoicePlace], signed_ticket: str) -> str:
    """The id of an event after which a client has so much of each choice."""
    return f"{','.join(map(str, places))}.{signed_ticket}"


def _place(text: str) -> ChoicePlace:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise _unknown()
    chars, thoughts, calls, finished = found.groups()
    return ChoicePlace(int(chars) if chars else None, bool(finished), int(thoughts or 0), int(calls or 0))


def _unknown() -> RequestError:
    return RequestError(
        "Last-Event-ID is not an id of this deployment's streams; leave it out to begin a new one",
        code="invalid_event_id",
    )
