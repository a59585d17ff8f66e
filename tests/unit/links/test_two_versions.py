"""Two ends of a link that are of two versions: what each says of itself, and what ends a session."""

from __future__ import annotations

import pytest

from shared.wire.messages import UNDERSTOOD
from tests.doubles.novelty import Novelty
from tests.unit.links.cable import connected, downs


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
