"""A worker's socket when a send raises what nobody foresaw."""

from __future__ import annotations

import pytest

from shared.links.poller import SocketPoller
from shared.links.sockets import _WorkerWire
from shared.wire.messages import UNDERSTOOD
from tests.doubles.novelty import Novelty
from tests.link_keys import new_keys
from tests.unit.links.cable import connected, downs
from tests.unit.links.two_peers import SETTINGS, Listening


class Sending:
    """A socket that fails for one connection, and keeps what is sent to the others."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []  # connections

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        del flags
        if frames[0] == b"fuzzed":
            raise KeyError("what nobody foresaw")
        self.sent.append(frames[0])


def test_an_error_in_sending_ends_that_session_and_the_other_gets_its_messages() -> None:
    peers, sending = Listening(), Sending()
    wire = _WorkerWire(peers.end, "127.0.0.1", 0, new_keys()["worker"], SETTINGS, peers.end.notes.append)
    wire.register(poller := SocketPoller())
    peers.end.notes.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_router_socket", sending)
        wire.flush(0.0)
    assert sending.sent == [b"other"]
    assert [note.event for note in peers.end.notes if note.level == "error"].count("link.failed") >= 1
    assert peers.other_is_served()
    wire.close(0.0)
    poller.close()


# ---- two ends of a link that are of two versions: what each says of itself, and what ends a session ------------------


@pytest.mark.parametrize("to", ["router", "worker"])
def test_an_unknown_message_ends_that_session_with_a_reason_that_names_it(to: str) -> None:
    cable = connected()
    (cable.router_sends if to == "worker" else cable.worker_sends)(Novelty("r"))
    cable.run()
    reader = "decode" if to == "worker" else "router"
    reason = f"unknown message 'Novelty': a {reader} of this version does not read it"
    saw, sent = cable.worker_saw, cable.router_saw
    if to == "router":
        saw, sent = sent, saw
    assert downs(saw) == [reason]
    assert downs(sent)[0].endswith(reason)


def test_each_end_says_which_messages_beyond_the_protocol_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNDERSTOOD, "router", ("Lent",))
    monkeypatch.setitem(UNDERSTOOD, "decode", ("Lend", "Novelty"))
    cable = connected()
    assert cable.last_up(cable.worker_saw).hello.understands == ("Lent",)
    assert cable.last_up(cable.router_saw).hello.understands == ("Lend", "Novelty")
