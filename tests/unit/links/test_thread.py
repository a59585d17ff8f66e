"""The I/O thread of links, with an end and a wire that only record their calls."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest
from structlog.testing import capture_logs

from shared.batch.effects import Note
from shared.links.counters import LinkCounters
from shared.links.events import LinkEvent, PeerUp
from shared.links.poller import SocketPoller
from shared.links.thread import ThreadedLinks
from shared.wire.messages import Cancel, Hello
from tests.doubles.novelty import Novelty
from tests.link_settings import link_settings
from tests.waiting import until

SETTINGS = link_settings(silence_seconds=3.0)
HEARTBEAT_AT = 130.0


class Recorded:
    """An end, a wire and a clock; `read` waits while the gate is shut."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = 100.0
        self.gate = threading.Event()
        self.gate.set()
        self.events: list[LinkEvent] = []
        self.notes: list[Note] = []
        self.written: list[str] = []  # events of the notes
        self.deadline = HEARTBEAT_AT
        self.counters = LinkCounters()
        self.received_bytes = 0
        self.broken = False  # sending fails

    def tick(self, now: float) -> None:
        del now
        self.calls.append("tick")

    def send(self, peer: str, session: int, body: bytes, now: float) -> None:
        del peer, session, body, now
        self.calls.append("send")
        if self.broken:
            raise KeyError("what nobody foresaw")

    def give_up(self, peer: str, session: int, reason: str, now: float) -> None:
        del peer, session, now
        self.calls.append(reason)

    def register(self, poller: SocketPoller) -> None:
        del poller
        self.calls.append("register")

    def read(self, ready: Collection[object], now: float, unread_full: bool) -> None:
        del ready, now, unread_full
        self.calls.append("read")
        self.gate.wait(10)

    def flush(self, now: float) -> None:
        del now
        self.calls.append("flush")

    def close(self, now: float) -> None:
        del now
        self.calls.append("close")
        self.notes.append(Note("link.closed", {}))

    def write(self, note: Note) -> None:
        self.written.append(note.event)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def thread(recorded: Recorded) -> Iterator[ThreadedLinks]:
    thread = ThreadedLinks(
        recorded, recorded, SETTINGS, write_note=recorded.write, clock=lambda: recorded.now
    )
    until(lambda: recorded.calls == ["register"], 5, "its start")
    yield thread
    thread.close()


@pytest.mark.parametrize(
    ("late_seconds", "calls"),
    [
        pytest.param(2.9, ["read", "tick", "flush"], id="late by less: a heartbeat that waits is heard"),
        pytest.param(3.0, ["tick", "read", "tick", "flush"], id="frozen: what waits is of ended sessions"),
    ],
)
def test_a_thread_that_comes_late_by(
    recorded: Recorded, thread: ThreadedLinks, late_seconds: float, calls: list[str]
) -> None:
    recorded.calls.clear()
    recorded.now = HEARTBEAT_AT + late_seconds
    thread.command(lambda now: setattr(recorded, "deadline", now + 30))
    until(lambda: "flush" in recorded.calls, 5, "a turn")
    assert recorded.calls[: len(calls)] == calls


def test_a_freeze_in_the_middle_of_a_turn_is_a_freeze(recorded: Recorded, thread: ThreadedLinks) -> None:
    recorded.gate.clear()
    thread.command(lambda _: None)
    until(lambda: "read" in recorded.calls, 5, "reading")
    recorded.calls.clear()
    recorded.now = HEARTBEAT_AT + SETTINGS.silence_seconds
    recorded.gate.set()
    until(lambda: recorded.calls.count("flush") >= 2, 5, "the next turn")
    assert recorded.calls[:5] == ["tick", "flush", "tick", "read", "tick"]


def test_notes_are_written_once_each_also_those_of_closing(recorded: Recorded, thread: ThreadedLinks) -> None:
    thread.command(lambda _: recorded.notes.append(Note("link.noted", {})))
    until(lambda: recorded.written == ["link.noted"], 5, "the note")
    thread.close()
    assert recorded.written == ["link.noted", "link.closed"]


def test_what_was_sent_while_the_thread_was_busy_goes_before_the_closing(
    recorded: Recorded, thread: ThreadedLinks
) -> None:
    recorded.gate.clear()
    thread.command(lambda _: None)
    until(lambda: "read" in recorded.calls, 5, "reading")
    thread.command(lambda _: recorded.calls.append("sent"))
    closing = threading.Thread(target=thread.close)
    closing.start()
    until(lambda: thread._closing, 5, "closing")
    recorded.gate.set()
    closing.join()
    assert recorded.calls[-2:] == ["sent", "close"]


def test_an_error_in_sending_ends_that_session_with_a_reason_and_not_the_thread(
    recorded: Recorded, thread: ThreadedLinks
) -> None:
    recorded.broken = True
    thread.send("decode-a", Cancel("a", 0))
    until(lambda: any("KeyError at test_thread.py" in call for call in recorded.calls), 5, "the reason")
    recorded.calls.clear()
    thread.command(lambda _: recorded.calls.append("carried out"))
    until(lambda: "carried out" in recorded.calls, 5, "another command")


def test_what_a_peer_does_not_understand_is_not_sent_and_counted_and_written_once(
    recorded: Recorded, thread: ThreadedLinks
) -> None:
    hellos = [
        Hello(session=1, role="decode", uid=uid, epoch=1, understands=understands)
        for uid, understands in (("old", ()), ("new", ("Novelty",)))
    ]
    thread.command(lambda _: recorded.events.extend(PeerUp(hello.uid, hello) for hello in hellos))
    until(lambda: len(thread.receive(1)) == 2, 5, "the peers")
    for _ in range(3):
        thread.send("old", Novelty("r"))
    thread.send("new", Novelty("r"))
    thread.send("old", Cancel("r", 0))
    until(lambda: recorded.calls.count("send") == 2, 5, "what is understood")
    assert recorded.counters.not_understood == 3
    until(lambda: recorded.written == ["link.not_understood"], 5, "the note")
    assert "unsent_bytes_max reached" not in recorded.calls


def test_an_error_in_a_command_does_not_end_the_thread(recorded: Recorded, thread: ThreadedLinks) -> None:
    def fail(_: float) -> None:
        raise KeyError("what nobody foresaw")

    with capture_logs() as lines:
        thread.command(fail)
        thread.command(lambda _: recorded.calls.append("carried out"))
        until(lambda: "carried out" in recorded.calls, 5, "the command after it")
    assert [line["event"] for line in lines] == ["link.command_failed"]


def test_more_than_may_wait_for_a_busy_link_thread_ends_the_session(recorded: Recorded) -> None:
    settings = link_settings(unsent_bytes_max=10_000)
    thread = ThreadedLinks(
        recorded, recorded, settings, write_note=recorded.write, clock=lambda: recorded.now
    )
    recorded.gate.clear()
    thread.command(lambda _: None)
    until(lambda: "read" in recorded.calls, 5, "reading")
    for _ in range(10_000):
        thread.send("decode-a", Cancel("x" * 1000, 0))
    assert len(thread._commands) < 12
    recorded.gate.set()
    until(lambda: "unsent_bytes_max reached" in recorded.calls, 5, "the end of the session")
    thread.close()
    assert recorded.calls.count("unsent_bytes_max reached") == 1
