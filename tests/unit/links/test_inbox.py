"""What waits for a busy receiver: everything in order and bounded, and of each worker only its newest load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.links.inbox import EVENTS_A_TAKE, Inbox
from shared.wire.messages import Cancel, Draining, Hello, Load, Renew
from tests.link_settings import link_settings

PEERS = ("prefill-a", "decode-a", "decode-b")
MESSAGES = (Load(queued=1), Load(queued=2), Draining(), Cancel("a", 0))


def events() -> st.SearchStrategy[LinkEvent]:
    peers = st.sampled_from(PEERS)
    return st.one_of(
        st.builds(Received, peers, st.sampled_from(MESSAGES)),
        st.builds(PeerDown, peers, st.just("silence")),
        st.builds(lambda uid: PeerUp(uid, Hello(session=1, role="decode", uid=uid, epoch=1)), peers),
    )


def is_load(event: LinkEvent, peer: str) -> bool:
    return isinstance(event, Received) and event.peer == peer and isinstance(event.message, Load)


@given(st.lists(st.lists(events(), max_size=6), max_size=6))
def test_what_is_taken_is_what_came_without_the_loads_that_a_newer_one_followed(
    puts: list[list[LinkEvent]],
) -> None:
    inbox = Inbox(link_settings(), on_ready=None)
    for put in puts:
        inbox.put(put, 0)
    came = [event for put in puts for event in put]
    newest = {peer: max((n for n, e in enumerate(came) if is_load(e, peer)), default=-1) for peer in PEERS}
    expected = [
        event
        for number, event in enumerate(came)
        if not any(is_load(event, peer) and number != newest[peer] for peer in PEERS)
    ]
    assert inbox.take(0) == expected
    assert inbox.take(0) == []


def test_of_a_crowd_a_part_is_taken_and_the_sessions_known_are_those_of_that_part() -> None:
    inbox = Inbox(link_settings(), on_ready=lambda: None)
    first, second = (Hello(session=session, role="decode", uid="decode-a", epoch=1) for session in (1, 2))
    between: list[LinkEvent] = [Received("decode-a", Draining()) for _ in range(EVENTS_A_TAKE)]
    ends: list[LinkEvent] = [PeerDown("decode-a", "silence"), PeerUp("decode-a", second)]
    inbox.put([PeerUp("decode-a", first), *between, *ends], 0)
    assert len(inbox.take(0)) == EVENTS_A_TAKE
    assert inbox.hellos == {"decode-a": first}, "the caller has not heard of its end"
    assert inbox.take(0) == [between[-1], *ends]
    assert inbox.hellos == {"decode-a": second}


def test_a_worker_takes_all_that_came_during_a_step() -> None:
    """It takes once a step. What it left would pile up, until renewals of leases come too late."""
    inbox = Inbox(link_settings(), on_ready=None)
    step: list[LinkEvent] = [Received("router-a", Renew(str(number), 1)) for number in range(1024)]
    for _ in range(20):
        inbox.put(step, 0)
        assert inbox.take(0) == step
        assert not inbox.full


@given(st.lists(st.sampled_from([0, 1, EVENTS_A_TAKE - 1, EVENTS_A_TAKE, 2 * EVENTS_A_TAKE + 1])))
def test_a_caller_that_comes_again_only_behind_a_full_part_misses_nothing(steps: list[int]) -> None:
    """Steps are events that come at once, or 0 for a call that is due: as the shell does it on its loop."""
    due = came = taken = 0

    def on_ready() -> None:
        nonlocal due
        due += 1

    def call() -> None:
        nonlocal due, taken
        events = inbox.take(0)
        taken += len(events)
        due += (len(events) >= EVENTS_A_TAKE) - 1

    inbox = Inbox(link_settings(unread_messages_max=100_000), on_ready)
    for step in steps:
        if step:
            inbox.put([Received("decode-a", Draining())] * step, 0)
            came += step
        elif due:
            call()
    while due:
        call()
    assert taken == came


def test_a_fleet_that_only_tells_its_load_never_fills_the_inbox() -> None:
    inbox = Inbox(link_settings(unread_messages_max=10, unread_bytes_max=1000), on_ready=None)
    for turn in range(100):
        inbox.put([Received(f"decode-{number}", Load(running=turn)) for number in range(20)], 0)
        assert not inbox.full
    assert inbox.take(0) == [Received(f"decode-{number}", Load(running=99)) for number in range(20)]


def test_a_load_that_was_taken_is_not_replaced_by_the_next_one() -> None:
    inbox = Inbox(link_settings(), on_ready=None)
    inbox.put([Received("decode-a", Load(running=1))], 0)
    assert inbox.take(0) == [Received("decode-a", Load(running=1))]
    inbox.put([Received("decode-a", Load(running=2))], 0)
    assert inbox.take(0) == [Received("decode-a", Load(running=2))]


def test_an_inbox_is_full_by_bytes_as_well_as_by_messages() -> None:
    inbox = Inbox(link_settings(unread_messages_max=3, unread_bytes_max=1000), on_ready=None)
    event = Received("decode-a", Cancel("a", 0))
    for messages, body_bytes in ((1, 1000), (3, 3)):
        inbox.put([event] * messages, body_bytes)
        assert inbox.full
        assert len(inbox.take(0)) == messages
        assert not inbox.full
