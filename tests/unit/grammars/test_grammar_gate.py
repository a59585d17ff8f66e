"""Requests wait for their grammar between the links and the loop; all else passes."""

from __future__ import annotations

from typing import Any

import pytest

from shared.links.events import LinkEvent, PeerDown, PeerUp, Received
from shared.wire.baton import Baton, Holder, agent_name
from shared.wire.grammar import Grammar
from shared.wire.messages import Cancel, Decode, DrainAck, Failed, Hello, Message, Prefill, Refused, Renew
from shared.wire.sampling_params import SamplingParams
from shared.worker import grammar_gate
from shared.worker.grammar_gate import POLL_SECONDS, GrammarGate

SLOW, OTHER = Grammar("regex", "slow"), Grammar("regex", "other")
BATON = Baton("a", 0, Holder("p", 1, agent_name("p", 1), b"", 0, 4096, 0), "kv", 3, 77, 1, 1, (0,))


class SlowGrammars:
    """Grammars that are compiled when a test says so."""

    def __init__(self) -> None:
        self.prepared: list[Grammar] = []
        self.compiled: dict[Grammar, str] = {}  # with what is wrong with each

    def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)

    def ready(self, grammar: Grammar) -> bool:
        return grammar in self.compiled

    def error(self, grammar: Grammar) -> str:
        return self.compiled[grammar]


class GatedLinks:
    """Links that receive what a test puts into them."""

    def __init__(self) -> None:
        self.coming: list[LinkEvent] = []
        self.sent: list[tuple[str, Message]] = []
        self.patience = -1.0

    def receive(self, timeout_seconds: float) -> list[LinkEvent]:
        self.patience = timeout_seconds
        events, self.coming = self.coming, []
        return events

    def send(self, peer: str, message: Message) -> None:
        self.sent.append((peer, message))


class Gated:
    """A gate with two routers, of which the second is of an older version."""

    def __init__(self) -> None:
        self.links, self.grammars = GatedLinks(), SlowGrammars()
        self.gate = GrammarGate(self.links, self.grammars)
        for peer, understands in (("new", ("Failed",)), ("old", ())):
            hello = Hello(session=1, role="router", uid=peer, epoch=1, understands=understands)
            self.links.coming.append(PeerUp(peer, hello))
        self.gate.receive(0)

    def comes(self, *messages: Message, peer: str = "new") -> list[Message]:
        self.links.coming += [Received(peer, message) for message in messages]
        return self.passes()

    def passes(self) -> list[Message]:
        return [event.message for event in self.gate.receive(0.25) if isinstance(event, Received)]


@pytest.fixture
def gated() -> Gated:
    return Gated()


def prefill(rid: str, grammar: Grammar | None = SLOW, attempt: int = 0) -> Prefill:
    return Prefill(rid, attempt, (1, 2), 2, SamplingParams(max_new_tokens=4, seed=1, grammar=grammar))


def decode(rid: str, **params: Any) -> Decode:
    return Decode(rid, 0, (1, 2), 1, SamplingParams(max_new_tokens=4, seed=1, grammar=SLOW, **params), BATON)


@pytest.mark.parametrize("command", [prefill("a"), decode("a")])
def test_a_request_passes_when_its_grammar_is_compiled(gated: Gated, command: Message) -> None:
    assert gated.comes(command, prefill("b", None), Renew("c", 0)) == [prefill("b", None), Renew("c", 0)]
    assert gated.passes() == []
    assert gated.grammars.prepared == [SLOW]
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [command]
    assert gated.passes() == []


def test_a_compiled_grammar_is_not_waited_for(gated: Gated) -> None:
    gated.grammars.compiled[SLOW] = ""
    assert gated.comes(prefill("a")) == [prefill("a")]


def test_those_that_wait_pass_in_their_order(gated: Gated) -> None:
    gated.comes(prefill("a"), prefill("b", OTHER), prefill("c"))
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [prefill("a"), prefill("c")]
    gated.grammars.compiled[OTHER] = ""
    assert gated.passes() == [prefill("b", OTHER)]


def test_the_loop_looks_often_while_one_waits(gated: Gated) -> None:
    gated.comes(prefill("a"))
    gated.passes()
    assert gated.links.patience == POLL_SECONDS
    gated.grammars.compiled[SLOW] = ""
    gated.passes()
    gated.passes()
    assert gated.links.patience == 0.25


def test_what_cannot_be_compiled_ends_the_request(gated: Gated) -> None:
    gated.comes(prefill("a"))
    gated.comes(prefill("b"), peer="old")
    gated.grammars.compiled[SLOW] = "too many states"
    assert gated.passes() == []
    failed = Failed("a", 0, 400, "grammar_too_complex", "the grammar cannot be compiled: too many states")
    assert gated.links.sent == [
        ("new", failed),
        ("old", Refused("b", 0, "internal", "its grammar cannot be compiled")),
    ]
    assert gated.gate.waiting == 0


def test_a_cancelled_request_waits_no_more(gated: Gated) -> None:
    gated.comes(prefill("a"), prefill("b"))
    assert gated.comes(Cancel("a", 0)) == [Cancel("a", 0)]
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [prefill("b")]


def test_a_newer_attempt_takes_the_place_of_the_older_one(gated: Gated) -> None:
    gated.comes(prefill("a"), prefill("a", attempt=1))
    gated.comes(Cancel("a", 0))
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [prefill("a", attempt=1)]


def test_a_lost_router_takes_its_requests_along(gated: Gated) -> None:
    gated.comes(prefill("a"))
    gated.comes(prefill("b"), peer="old")
    gated.links.coming.append(PeerDown("new", "gone"))
    gated.passes()
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [prefill("b")]


def test_a_drain_is_acknowledged_behind_what_waits_of_its_router(gated: Gated) -> None:
    gated.comes(prefill("a"))
    assert gated.comes(DrainAck()) == []
    assert gated.comes(DrainAck(), peer="old") == [DrainAck()]
    gated.grammars.compiled[SLOW] = ""
    assert gated.passes() == [prefill("a"), DrainAck()]


def test_a_cancelled_request_holds_up_no_drain(gated: Gated) -> None:
    gated.comes(prefill("a"), DrainAck())
    assert gated.comes(Cancel("a", 0)) == [Cancel("a", 0), DrainAck()]


def test_those_that_wait_are_bounded(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_gate, "WAITING_GRAMMARS_MAX", 2)
    gated.comes(prefill("a"), prefill("b"), prefill("c"))
    detail = "too many requests wait for their grammar to be compiled"
    assert gated.links.sent == [("new", Refused("c", 0, "no_room", detail))]
    assert gated.gate.waiting == 2
