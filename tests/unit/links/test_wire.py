"""What is on the wire between versions: every message's bytes of today, and all that they have been.

`wire_bytes.txt` has a line for each form that a message has had. A line is never changed or removed: a process of that
version is still to be understood. After a change that is meant, set the new field in `wire.INSTANCES` and run
`python -m tests.unit.links.wire`, which adds a line below. The older lines must still decode.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from shared.wire import messages
from shared.wire.messages import (
    FAILED_CHARACTERS_MAX,
    PROTOCOL_MESSAGES,
    READABLE,
    SCORES_MAX,
    UNDERSTOOD,
    Cancel,
    Failed,
    FinishReason,
    Generated,
    Hello,
    Message,
    RefusalReason,
    Role,
    Row,
    Scored,
    decode_from_router,
    decode_from_worker,
    encode,
)
from shared.wire.sampled import TOP_LOGPROBS_MAX, TokenLogprobs
from tests.doubles.novelty import Novelty
from tests.unit.links.wire import BATON, HOLDER, INSTANCES, LIMITS, PARAMS, ROW, recorded

NAMES = [type(message).__name__ for message in INSTANCES]
DECODERS: dict[Role, Any] = {**decode_from_router, "router": decode_from_worker}
LATER = {"of_a_later_version": [1, {"type": "Unheard"}]}


def decoded(body: bytes) -> Message:
    """As every role reads it that has the message at all."""
    name = msgspec.msgpack.decode(body)["type"]
    readers = [role for role in READABLE if name in READABLE[role]]
    message: Message = DECODERS[readers[0]](body)
    assert all(DECODERS[role](body) == message for role in readers)
    return message


def with_later_fields(plain: Any) -> Any:
    """Every struct in it, however deep, has one field more."""
    if isinstance(plain, dict) and all(isinstance(key, str) for key in plain):
        return {key: with_later_fields(value) for key, value in plain.items()} | LATER
    if isinstance(plain, list):
        return [with_later_fields(value) for value in plain]
    return plain


def test_every_message_has_its_bytes_recorded() -> None:
    assert set(NAMES) == set(recorded()) == set().union(*READABLE.values())
    assert set(NAMES) >= PROTOCOL_MESSAGES


@pytest.mark.parametrize("message", INSTANCES, ids=NAMES)
def test_a_message_has_the_bytes_that_were_recorded_last(message: Message) -> None:
    assert encode(message).hex() == recorded()[type(message).__name__][-1].hex()


def as_sent(value: Any, plain: Any) -> Any:
    """The value with the default in each field, however deep, that its bytes, as plain data, do not have."""
    if isinstance(value, tuple) and isinstance(plain, list):
        return tuple(as_sent(*pair) for pair in zip(value, plain, strict=True))
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.structs.fields(value)
    if isinstance(plain, list):  # an array: its names are the first ones
        plain = dict(zip((field.name for field in fields), plain, strict=False))
    return type(value)(
        **{
            field.name: as_sent(getattr(value, field.name), plain[field.name])
            for field in fields
            if field.name in plain
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_older_form_of_a_message_is_still_read(name: str) -> None:
    instance = next(message for message in INSTANCES if type(message).__name__ == name)
    for body in recorded()[name]:
        assert decoded(body) == as_sent(instance, msgspec.msgpack.decode(body))


@pytest.mark.parametrize("message", INSTANCES, ids=NAMES)
def test_fields_of_a_later_version_are_ignored(message: Message) -> None:
    plain = with_later_fields(msgspec.msgpack.decode(encode(message)))
    assert decoded(msgspec.msgpack.encode(plain)) == message


def test_a_row_of_a_later_version_has_more_at_its_end() -> None:
    generated = Generated((ROW,))
    plain = msgspec.msgpack.decode(encode(generated))
    plain["rows"][0].append("of a later version")
    assert decoded(msgspec.msgpack.encode(plain)) == generated


@pytest.mark.parametrize(
    "struct", [*INSTANCES, LIMITS, ROW, PARAMS, HOLDER, BATON], ids=lambda struct: type(struct).__name__
)
def test_each_recorded_field_has_a_value_of_its_own(struct: msgspec.Struct) -> None:
    """Else a field that is new would not be seen in the bytes."""
    neutral = [f.name for f in msgspec.structs.fields(struct) if getattr(struct, f.name) == f.default]
    assert neutral == []


def test_closed_sets_do_not_grow() -> None:
    """An older reader refuses a message with a value that it does not know, and ends the session."""
    assert get_args(RefusalReason) == ("no_room", "stale", "too_long", "unreachable", "internal")
    assert get_args(FinishReason) == ("length", "stop")
    assert get_args(Role) == ("router", "prefill", "decode")
    with pytest.raises(msgspec.ValidationError):
        decoded(encode(messages.Refused("r", 1, "novel")))  # type: ignore[arg-type]


@pytest.mark.parametrize("understands", [(), ("Novelty",)])
def test_a_peer_reads_what_the_protocol_has_and_what_it_lists(understands: tuple[str, ...]) -> None:
    hello = Hello(session=1, role="decode", uid="d", epoch=1, understands=understands)
    assert hello.reads(Cancel)
    assert hello.reads(Novelty) == bool(understands)


def test_messages_beyond_the_protocol_are_listed_by_those_that_read_them() -> None:
    assert {role: set(names) for role, names in UNDERSTOOD.items()} == {
        role: set(names) - PROTOCOL_MESSAGES for role, names in READABLE.items()
    }


def test_a_report_names_no_more_of_the_likeliest_than_the_bound() -> None:
    def reported(names: int) -> bytes:
        told = TokenLogprobs(-1.0, 1, ((7, -1.0),) * names)
        return encode(Generated((Row("r", 1, 0, (7,), (told,)),)))

    assert decode_from_worker(reported(TOP_LOGPROBS_MAX)) is not None
    with pytest.raises(msgspec.ValidationError, match="length <= 20"):
        decode_from_worker(reported(TOP_LOGPROBS_MAX + 1))


def test_a_report_holds_no_more_scores_than_the_bound() -> None:
    most = Scored("r", 1, 1, (TokenLogprobs(-1.0),) * SCORES_MAX)
    assert decode_from_worker(encode(most)) == most
    for wrong in ((), (*most.logprobs, TokenLogprobs(-1.0))):
        with pytest.raises(msgspec.ValidationError, match="length"):
            decode_from_worker(encode(msgspec.structs.replace(most, logprobs=wrong)))


def test_a_worker_cannot_send_an_endless_sentence() -> None:
    longest = Failed("r", 1, 400, "code", "a" * FAILED_CHARACTERS_MAX)
    assert decode_from_worker(encode(longest)) == longest
    with pytest.raises(msgspec.ValidationError, match="message"):
        decode_from_worker(encode(msgspec.structs.replace(longest, message=longest.message + "a")))
