"""Messages that travel in parts, and what a peer of either end may make it keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.links.session import (
    FRAME_BYTES_MAX,
    LAST,
    PART_BYTES_MAX,
    Envelope,
    Session,
    SessionError,
    closing_frames,
    open_envelope,
)
from shared.links.thread import COMMAND_BYTES, Outbox
from tests.link_settings import link_settings

BYTES_MAX = 5 * PART_BYTES_MAX
SETTINGS = link_settings(message_bytes_max=BYTES_MAX)
SESSION = ("decode-a", 7)


def pair() -> tuple[Session, Session]:
    return Session(1, SETTINGS, 0.0), Session(1, SETTINGS, 0.0)


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, PART_BYTES_MAX - 1, PART_BYTES_MAX, PART_BYTES_MAX + 1, BYTES_MAX]), max_size=6
    )
)
def test_messages_of_any_sizes_arrive_whole_and_in_order_in_frames_of_bounded_size(sizes: list[int]) -> None:
    sender, receiver = pair()
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    arrived = []
    for body in bodies:
        for frames in sender.next_parts(body, 0.0):
            assert sum(map(len, frames)) + 64 <= FRAME_BYTES_MAX, "room for CURVE"
            arrived.append(receiver.accept(open_envelope(frames), 0.0))
    assert [body for body in arrived if body is not None] == bodies


def test_a_message_over_the_bound_ends_the_session_while_it_arrives() -> None:
    _, receiver = pair()
    kept = bytes(PART_BYTES_MAX)
    for number in range(BYTES_MAX // PART_BYTES_MAX):
        assert receiver.accept(Envelope(1, number, True, kept), 0.0) is None
    with pytest.raises(SessionError, match="message_bytes_max"):
        receiver.accept(Envelope(1, number + 1, True, b"x"), 0.0)


def test_a_closing_may_come_between_two_parts() -> None:
    sender, receiver = pair()
    first, *_ = sender.next_parts(bytes(2 * PART_BYTES_MAX), 0.0)
    assert receiver.accept(open_envelope(first), 0.0) is None
    closing = open_envelope(closing_frames(1, "x" * 100_000))
    assert closing.number == LAST
    assert len(closing.part) < 2000
    assert receiver.accept(closing, 0.0) == closing.part


def test_what_waits_for_the_link_thread_is_bounded_and_a_session_is_given_up_once() -> None:
    outbox = Outbox(unsent_bytes_max=10 * (COMMAND_BYTES + 100))
    verdicts = [outbox.add(SESSION, bytes(100)) for _ in range(13)]
    assert verdicts == ["waits"] * 10 + ["over"] + ["given up"] * 2
    assert outbox.add(("decode-b", 8), bytes(100)) == "waits", "each session has its own bound"
    outbox.forget(SESSION)
    for _ in range(10):
        outbox.remove(SESSION, bytes(100))
    assert outbox.add(SESSION, bytes(100)) == "waits"
