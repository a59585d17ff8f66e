"""Any bytes at either end of a link: that session ends with a reason and is counted, and nothing else happens.

`FUZZ_EXAMPLES=20000 python -m pytest tests/unit/links/test_fuzzed_bytes.py` is the longer run by hand.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.links.events import PeerDown, Received
from shared.links.session import seal
from shared.wire.messages import (
    Cancel,
    Heartbeat,
    Load,
    Message,
    Prefill,
    Refused,
    Release,
    Renew,
    encode,
)
from shared.wire.sampling_params import SamplingParams
from tests.fuzzing import fuzzed
from tests.unit.links.two_peers import Dialing, Listening

FROM_ROUTERS: tuple[Message, ...] = (
    Prefill("a", 0, (1, 2, 3), 8, SamplingParams(seed=1, max_new_tokens=9)),
    Cancel("a", 0), Release("a", 0), Renew("a", 0), Heartbeat(),
)  # fmt: skip
FROM_WORKERS: tuple[Message, ...] = (Refused("a", 0, "stale"), Load(free_pages=3, slots_free=4), Heartbeat())

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@st.composite
def changed(draw: st.DrawFn, messages: tuple[Message, ...]) -> bytes:
    """A valid message in which bytes were changed, dropped, repeated, or a field was put in another's place."""
    body = encode(draw(st.sampled_from(messages)))
    how = draw(st.sampled_from(["bytes", "cut", "repeat", "field"]))
    at = draw(st.integers(0, len(body) - 1))
    if how == "cut":
        return body[:at]
    if how == "repeat":
        return body[:at] + body[at // 2 :]
    if how == "bytes":
        return body[:at] + draw(st.binary(min_size=1, max_size=8)) + body[at + 1 :]
    plain: Any = msgspec.msgpack.decode(body)
    key = draw(st.sampled_from(sorted(plain) if isinstance(plain, dict) else range(len(plain))))
    plain[key] = draw(values)
    return msgspec.msgpack.encode(plain)


def bodies(messages: tuple[Message, ...]) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=200) | values.map(msgspec.msgpack.encode) | changed(messages)


def frames_of(session: int, messages: tuple[Message, ...]) -> st.SearchStrategy[list[bytes]]:
    """Mostly the next frames of the session with a strange body, and sometimes any frames."""
    numbers = st.just(1) | st.integers(0, 2**64 - 1)
    sessions = st.just(session) | st.integers(0, 2**64 - 1)
    sealed = st.builds(seal, sessions, numbers, bodies(messages), more=st.booleans())
    return sealed | st.lists(st.binary(max_size=40), max_size=4)


def judge(side: Listening | Dialing, batch: list[list[bytes]]) -> None:
    """Either a message was understood, or its session ended with a reason and one more malformed; the other lives."""
    for frames in batch:
        side.receive(frames)
    downs = [event for event in side.end.events if isinstance(event, PeerDown)]
    counters = side.end.counters
    assert all(down.reason and down.peer[1] == "1" for down in downs)
    assert counters.sessions_ended == len(downs)
    assert not [note for note in side.end.notes if note.event == "link.failed"], "no error of ours"
    ended_by_bytes = [down for down in downs if not down.reason.startswith(("closed by", "a new session"))]
    assert counters.malformed >= len(ended_by_bytes)
    assert side.other_is_served()


@fuzzed
@given(batch=st.lists(frames_of(1, FROM_ROUTERS), min_size=1, max_size=4))
def test_any_bytes_from_an_admitted_router_end_its_session_at_most(batch: list[list[bytes]]) -> None:
    judge(Listening(), batch)


@fuzzed
@given(batch=st.lists(frames_of(1, FROM_WORKERS), min_size=1, max_size=4))
def test_any_bytes_from_an_admitted_worker_end_its_session_at_most(batch: list[list[bytes]]) -> None:
    judge(Dialing(), batch)


@fuzzed
@given(body=changed(FROM_ROUTERS))
def test_a_changed_message_is_understood_or_ends_the_session_and_is_counted(body: bytes) -> None:
    side = Listening()
    side.receive(seal(1, 1, body))
    kinds = [type(event) for event in side.end.events]
    assert kinds in ([], [Received], [PeerDown])
    assert (kinds == [PeerDown]) == (side.end.counters.malformed == 1)
    assert kinds != [] or isinstance(msgspec.msgpack.decode(body), dict | list), (
        "only a heartbeat is no event"
    )
