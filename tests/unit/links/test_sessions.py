"""Both ends of a link against each other, under a virtual clock: numbering, silence, refusals, notes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.links.counters import LinkCounters
from shared.links.dialing import LOOK_SECONDS, Dial, HangUp, RouterEnd, SendFrames
from shared.links.events import PeerDown, PeerUp
from shared.links.session import seal
from shared.wire.messages import Cancel, Hello, Prefill, Refused, Renew, encode
from shared.wire.sampling_params import SamplingParams
from tests.unit.links.cable import (
    ADDRESS,
    ROUTER,
    SETTINGS,
    WORKER,
    Cable,
    connected,
    downs,
    kinds,
    noted,
    received,
)


def test_both_ends_learn_each_others_hello_and_name() -> None:
    cable = connected()
    assert cable.last_up(cable.router_saw).peer == WORKER
    assert cable.last_up(cable.worker_saw).peer == ROUTER
    sessions = {cable.last_up(events).hello.session for events in (cable.router_saw, cable.worker_saw)}
    assert sessions == {1000}


def test_messages_arrive_in_order_both_ways() -> None:
    cable = connected()
    commands = [Cancel(str(number), 0) for number in range(50)]
    answers = [Refused(str(number), 0, "stale") for number in range(50)]
    for command, answer in zip(commands, answers, strict=True):
        cable.router_sends(command)
        cable.worker_sends(answer)
    cable.run()
    assert received(cable.worker_saw) == commands
    assert received(cable.router_saw) == answers


def test_heartbeats_keep_a_quiet_link_up_and_are_no_events() -> None:
    cable = connected()
    cable.run(60.0)
    assert kinds(cable.router_saw) == kinds(cable.worker_saw) == [PeerUp]


def test_however_many_links_are_due_at_times_of_their_own_all_are_looked_at_seldom() -> None:
    """A look costs 0.2 ms for 600 links, and in a fleet one of them is always due."""
    end = RouterEnd(Hello(session=0, role="router", uid="r", epoch=1), SETTINGS, LinkCounters(), lambda: 7)
    dialed_at = {f"tcp://worker:{number}": number / 1000 for number in range(1000)}
    for address, now in dialed_at.items():
        end.connect(address, now)
        end.tick(now)
    end.outgoing.clear()
    looks = 0
    for now in (1 + milliseconds / 1000 for milliseconds in range(1000)):
        looks += now >= end.deadline
        end.tick(now)
        for step in end.outgoing:
            late_seconds = now - dialed_at.pop(step.address) - SETTINGS.heartbeat_seconds
            assert late_seconds <= LOOK_SECONDS + 0.002
        end.outgoing.clear()
    assert looks <= 1 / LOOK_SECONDS
    assert len(dialed_at) <= 1000 * LOOK_SECONDS


def test_silence_ends_the_session_at_both_ends_and_a_new_hello_begins_another() -> None:
    cable = connected()
    cable.cut = True
    cable.run(SETTINGS.silence_seconds - 1.1)
    assert downs(cable.router_saw) == downs(cable.worker_saw) == []
    cable.run(1.2)
    assert downs(cable.router_saw) == downs(cable.worker_saw) == ["silence"]
    cable.run(20.0)
    cable.cut = False
    cable.run(SETTINGS.silence_seconds + SETTINGS.redial_seconds_max)
    assert kinds(cable.router_saw) == kinds(cable.worker_saw) == [PeerUp, PeerDown, PeerUp]
    cable.router_sends(Cancel("a", 0))
    cable.run()
    assert received(cable.worker_saw) == [Cancel("a", 0)]


def test_a_worker_frozen_past_the_silence_limit_reads_nothing_of_the_old_session() -> None:
    cable = connected()
    cable.router_sends(Cancel("before", 0))
    waiting = [step.frames for step in cable.router.outgoing if isinstance(step, SendFrames)]
    connection = cable.connection
    cable.run(SETTINGS.silence_seconds + 0.5, worker_frozen=True)
    cable.worker.tick(cable.now)  # as the link thread does on waking, before it reads its sockets
    cable.worker.receive(connection, waiting[0], cable.now)
    assert cable.worker_counters.out_of_session == 1
    cable.run(SETTINGS.silence_seconds + SETTINGS.redial_seconds_max)
    assert kinds(cable.worker_saw) == [PeerUp, PeerDown, PeerUp]
    assert kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]
    assert received(cable.worker_saw) == []


def test_a_worker_that_was_cut_off_briefly_learns_of_the_new_session_by_its_hello() -> None:
    cable = connected()
    cable.router.end(ADDRESS, "disconnected", cable.now)
    cable.router.outgoing = [HangUp(ADDRESS)]  # Closed is lost
    cable.run(1.0)
    assert downs(cable.worker_saw) == ["a new session of the same router"]
    assert kinds(cable.worker_saw) == kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]


def test_a_restarted_worker_is_another_peer() -> None:
    cable = connected()
    cable.worker = cable.new_worker(epoch=3)
    cable.run(SETTINGS.heartbeat_seconds + SETTINGS.redial_seconds_max)
    assert kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]
    assert cable.last_up(cable.router_saw).peer == "decode-a/0000000000000003"


@pytest.mark.parametrize("direction", ["to_worker", "to_router"])
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        pytest.param(lambda batch: batch[1:], "gap", id="a lost message is a gap"),
        pytest.param(lambda batch: batch[:1] * 2 + batch[1:], "repeat", id="a repeated message is a repeat"),
        pytest.param(lambda batch: [batch[0][:1]], "malformed", id="a missing body is malformed"),
        pytest.param(lambda batch: [[*batch[0][:2], b"\xc1"]], "malformed", id="no msgpack is malformed"),
        pytest.param(lambda batch: [[b"x", *batch[0][1:]]], "malformed", id="a short number is malformed"),
    ],
)
def test_what_is_not_the_next_message_ends_the_session_and_a_new_one_begins(
    direction: str, tamper: Callable[[list[list[bytes]]], list[list[bytes]]], reason: str
) -> None:
    cable = connected()
    setattr(cable, direction, lambda batch: tamper(batch) if batch else batch)
    cable.router_sends(Cancel("lost", 0))
    cable.worker_sends(Refused("lost", 0, "stale"))
    cable.run()
    setattr(cable, direction, lambda batch: batch)
    cable.router_sends(Renew("next", 0))
    cable.worker_sends(Refused("next", 0, "stale"))
    cable.run(1.0)
    assert kinds(cable.router_saw).count(PeerUp) == kinds(cable.worker_saw).count(PeerUp) == 2
    saw = cable.worker_saw if direction == "to_worker" else cable.router_saw
    assert len(downs(saw)) == 1
    assert reason in downs(saw)[0].lower()


def test_a_message_for_a_session_that_is_over_is_never_sent_in_the_next_one() -> None:
    cable = connected()
    cable.router.end(ADDRESS, "disconnected", cable.now)
    cable.run(1.0)
    assert kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]
    cable.router_sends(Cancel("old", 0), session=1000)
    cable.router_sends(Cancel("new", 0))
    cable.run()
    assert received(cable.worker_saw) == [Cancel("new", 0)]
    assert cable.router.counters.messages_unsent == 1


def test_a_message_for_the_other_role_ends_that_session_and_is_counted() -> None:
    cable = connected()
    cable.router_sends(Prefill("a", 0, (1, 2), 2, SamplingParams(seed=0, max_new_tokens=1)))
    cable.run(1.0)
    assert received(cable.worker_saw) == []
    assert kinds(cable.worker_saw) == kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]
    assert "Prefill" in downs(cable.worker_saw)[0]
    assert cable.worker_counters.malformed == 1


def test_a_message_over_the_size_limit_ends_the_session() -> None:
    cable = connected()
    cable.router_sends(Cancel("x" * 20_000, 0))
    cable.run()
    assert "message_bytes_max" in downs(cable.router_saw)[0]
    assert "message_bytes_max" in downs(cable.worker_saw)[0]


@pytest.mark.parametrize(("router_protocol", "worker_protocol"), [(2, 1), (1, 2)])
def test_another_protocol_is_refused_and_counted(router_protocol: int, worker_protocol: int) -> None:
    cable = Cable(router_protocol=router_protocol, worker_protocol=worker_protocol)
    cable.run(5.0)
    assert PeerUp not in kinds(cable.router_saw)
    assert cable.worker_counters.refused_hello + cable.router.counters.refused_hello >= 2


def test_redials_slow_down_to_their_limit() -> None:
    cable = Cable()
    cable.cut = True
    cable.run(60.0)
    dials_per_minute = 60.0 / (SETTINGS.silence_seconds + SETTINGS.redial_seconds_max)
    assert dials_per_minute - 1 <= next(cable.connections) - 1 <= dials_per_minute + 3


def test_a_redial_ends_the_rest_of_a_link_that_is_down_and_changes_no_other() -> None:
    cable = connected()
    cable.cut = True
    cable.run(20.0)
    while cable.connection:  # until it rests
        cable.run(0.05)
    cable.cut = False
    cable.run()
    assert kinds(cable.router_saw) == [PeerUp, PeerDown]
    cable.router.redial(ADDRESS, cable.now)
    cable.router.redial("tcp://nobody:1", cable.now)
    cable.run()
    assert kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]
    cable.router.redial(ADDRESS, cable.now)
    cable.run(1.0)
    assert kinds(cable.router_saw) == [PeerUp, PeerDown, PeerUp]


def test_a_worker_that_may_still_be_loading_is_no_warning_and_one_that_stays_away_is_one() -> None:
    cable = Cable()
    cable.cut = True
    cable.run(50.0)
    assert noted(cable.notes) == [("link.unreachable", "info")]
    cable.run(200.0)
    assert noted(cable.notes) == [("link.unreachable", "info"), ("link.unreachable", "warning")]


def test_each_end_notes_when_a_session_begins_and_ends() -> None:
    cable = connected()
    assert noted(cable.notes) == [("link.up", "info")] * 2
    cable.notes.clear()
    cable.worker.end(cable.connection, "a test")
    cable.run()
    assert noted(cable.notes) == [("link.down", "info")] * 2
    assert [note.fields["peer"] for note in cable.notes] == [WORKER, ROUTER]


def test_closing_ends_the_sessions_at_the_other_end_too() -> None:
    cable = connected()
    cable.worker.close()
    cable.run()
    assert downs(cable.router_saw) == ["closed by the worker: closed here"]
    cable.run(5.0)
    cable.router.close(cable.now)
    cable.run(10.0)
    assert kinds(cable.worker_saw) == [PeerUp, PeerDown, PeerUp, PeerDown]


@pytest.mark.parametrize("part", ["_deliver", "_tick_link"])
@pytest.mark.parametrize("side", ["worker", "router"])
def test_an_error_of_ours_at_either_end_ends_the_session_and_a_new_one_begins(
    side: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cable = connected()

    def fail_once(*_: object) -> None:
        monkeypatch.undo()
        raise KeyError("what nobody foresaw")

    monkeypatch.setattr(getattr(cable, side), part, fail_once)
    cable.run(3.0)
    assert noted(cable.notes).count(("link.failed", "error")) == 1
    assert kinds(cable.router_saw) == kinds(cable.worker_saw) == [PeerUp, PeerDown, PeerUp]


def test_the_same_worker_at_two_addresses_is_linked_once() -> None:
    cable = connected()
    other = "tcp://alias:1"
    cable.router.connect(other, cable.now)
    cable.router.tick(cable.now)
    cable.router.outgoing.clear()
    hello = Hello(session=1001, role="decode", uid="decode-a", epoch=2)
    cable.router.receive(other, seal(1001, 0, encode(hello)), cable.now)
    assert cable.router.counters.refused_hello == 1
    assert cable.router.events == []


@given(st.lists(st.lists(st.binary(max_size=24), max_size=4), max_size=20), st.binary(max_size=64))
def test_no_bytes_of_an_admitted_peer_raise(messages: list[list[bytes]], body: bytes) -> None:
    cable = connected()
    session = cable.last_up(cable.worker_saw).hello.session
    cable.worker.receive(cable.connection, seal(session, 1, body), cable.now)
    cable.router.receive(ADDRESS, seal(session, 1, body), cable.now)
    for frames in messages:
        cable.worker.receive(cable.connection, frames, cable.now)
        cable.router.receive(ADDRESS, frames, cable.now)
    cable.run(10.0)
    assert kinds(cable.router_saw)[-1] is kinds(cable.worker_saw)[-1] is PeerUp


def test_deeply_nested_bytes_end_the_session_only() -> None:
    cable = connected()
    body = b"\x82\xa4type\xa6Cancel\xa1x" + b"\x91" * 9_000 + b"\xc0"
    with pytest.raises((RecursionError, msgspec.MsgspecError)):
        msgspec.msgpack.decode(b"\x91" * 9_000 + b"\xc0")
    cable.worker.receive(cable.connection, seal(1000, 1, body), cable.now)
    cable.run()
    assert len(downs(cable.worker_saw)) == 1


def test_an_error_in_dialing_one_worker_ends_that_dial_and_the_others_go_on() -> None:
    cable = connected()
    cable.router._draw_session = lambda: 1 // 0
    cable.router.connect("tcp://another:1", cable.now)
    cable.run(10.0)
    assert kinds(cable.router_saw) == [PeerUp]
    assert 4 <= noted(cable.notes).count(("link.failed", "error")) <= 10, "it rests between two dials"
    cable.router_sends(Cancel("a", 0))
    cable.run()
    assert received(cable.worker_saw) == [Cancel("a", 0)]


def test_a_dial_that_is_put_off_comes_again_soon_and_is_no_failure() -> None:
    """Where workers may have one of two keys, each dial tries the next: all would be made with the same one."""
    end = RouterEnd(Hello(session=0, role="router", uid="r", epoch=1), SETTINGS, LinkCounters(), lambda: 1)
    end.connect(ADDRESS, 0.0)
    now, dials = 0.0, []
    for _ in range(20):
        end.tick(now)
        dials += [step for step in end.outgoing if isinstance(step, Dial)]
        end.outgoing.clear()
        end.put_off(ADDRESS, now)
        assert now < end.deadline <= now + 2 * LOOK_SECONDS
        now = end.deadline
    assert dials == [Dial(ADDRESS, ungreeted=0)] * 20
    assert not end.notes
