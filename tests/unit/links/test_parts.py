"""Messages that travel in parts, and what a peer of either end may make it keep."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from shared.links.events import PeerDown
from shared.links.poller import READ_BATCH, READ_BATCH_BYTES, SocketPoller
from shared.links.session import (
    FRAME_BYTES_MAX,
    LAST,
    PART_BYTES_MAX,
    REASON_CHARACTERS_MAX,
    Envelope,
    Session,
    SessionError,
    closing_frames,
    open_envelope,
    seal,
)
from shared.links.thread import COMMAND_BYTES, Outbox
from shared.wire.messages import Closed, Hello, encode
from tests.link_settings import link_settings
from tests.unit.links.two_peers import Dialing, Listening

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
    with pytest.raises(SessionError, match="more than"):
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


def test_a_worker_sends_a_router_nothing_longer_than_a_report() -> None:
    side = Listening()
    side.end.send("r1/0000000000000002", 1, bytes(80_001), 0.0)
    assert [event.reason for event in side.end.events if isinstance(event, PeerDown)] == [
        "a message of 80001 bytes is over report_bytes_max"
    ]


def test_a_router_takes_nothing_longer_than_a_report() -> None:
    side = Dialing()
    side.receive(seal(1, 1, bytes(80_001), more=True))
    assert reason_of_the_end(side) == "malformed: a message of more than 80000 bytes"
    assert side.other_is_served()


def test_the_hello_of_a_worker_has_one_part() -> None:
    side = Dialing()
    hello = Hello(session=1, role="decode", uid="d", epoch=1, eos_token_ids=(70_000,) * 13_000)
    for frames in Session(1, SETTINGS, 0.0).next_parts(encode(hello), 0.0):
        header = open_envelope(frames)
        side.receive(seal(1, header.number + 1, header.part, more=header.more))
    assert reason_of_the_end(side) == "malformed: a Hello of several parts"


@pytest.mark.parametrize("side", [Listening(), Dialing()], ids=["a worker", "a router"])
def test_a_reason_of_any_length_is_kept_cut(side: Listening | Dialing) -> None:
    side.receive(seal(1, 1, encode(Closed("x" * 40_000))))
    reason = reason_of_the_end(side)
    assert reason.startswith("closed by the ")
    assert reason.count("x") == REASON_CHARACTERS_MAX
    assert max(len(str(note.fields)) for note in side.end.notes) < 1200


def reason_of_the_end(side: Listening | Dialing) -> str:
    """Of the session of the peer that misbehaves."""
    (down,) = [event for event in side.end.events if isinstance(event, PeerDown)]
    return down.reason


def test_a_turn_reads_no_more_from_one_socket_than_decoding_soon_ends() -> None:
    """The rest waits in ZMQ for the next turn, so heartbeats and other peers have theirs."""
    poller = SocketPoller()
    with zmq.Context() as context:
        near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        near.bind("inproc://parts")
        far.connect("inproc://parts")
        for _ in range(READ_BATCH + 1):
            far.send(bytes(PART_BYTES_MAX))
        longest = sum(len(frame) for frames in poller.read(near) for frame in frames)
        assert READ_BATCH_BYTES <= longest < READ_BATCH_BYTES + PART_BYTES_MAX
        while list(poller.read(near)):
            pass
        for _ in range(READ_BATCH + 1):
            far.send(b"")
        assert [len(list(poller.read(near))) for _ in range(2)] == [READ_BATCH, 1]
        near.close()
        far.close()
    poller.close()
