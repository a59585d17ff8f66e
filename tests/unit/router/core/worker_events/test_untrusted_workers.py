"""What a worker says of a request is not believed: more tokens than asked for, or pages that cannot be the request's.

None of it reaches the client, nobody pays for it, and the request goes on elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from router.core.effects import RequestCompleted, RequestFailed
from router.core.worker_events.worker_replies import METADATA_BYTES_MAX
from shared.wire.baton import HolderRank, agent_name
from shared.wire.messages import Cancel, Decode, Generated, Migrating, Prefill, Prefilled, Row
from tests.unit.router.deployment import ScriptedDeployment, decoding, request

MOST = 8  # tokens that a request asks for
PER_MINUTE = 100


def elsewhere(world: ScriptedDeployment, cause: str) -> None:
    """The request was taken from its worker because of `cause`, and another one has it."""
    assert +world.core.counters.continuations == {cause: 1}
    assert world.core.counters.worker_faults.total() == 0
    (cancelled, *_) = world.sent(Cancel, "r")
    assert world.placed(Prefill, "r") != cancelled[0]
    assert world.state("r") == "prefilling"


@pytest.mark.parametrize("tokens", [MOST + 1, 100_000])
def test_a_first_message_of_more_tokens_than_asked_for_is_not_delivered(tokens: int) -> None:
    world = ScriptedDeployment(2, 1)
    world.submit(request("r", max_new_tokens=MOST))
    pages = world.baton("p0", "r", 1, tokens)
    world.say("p0", Prefilled("r", 1, 0, (7,) * tokens, pages, "length"))
    assert world.output("r") == []
    assert world.core.counters.completion_tokens == 0
    elsewhere(world, "surplus")


@pytest.mark.parametrize("tokens", [MOST - 1, 300_000])
def test_rows_beyond_what_was_asked_for_are_not_delivered(tokens: int) -> None:
    world = decoding()
    world.generated("d0", "r", 2, *(7,) * tokens)
    assert world.output("r") == [10, 11]
    assert world.core.counters.completion_tokens == 2
    elsewhere(world, "surplus")


def test_a_surplus_behind_a_whole_answer_ends_it_with_what_was_asked_for() -> None:
    world = decoding()
    world.generated("d0", "r", 2, *range(MOST - 2))
    world.generated("d0", "r", MOST, 99)
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestCompleted)
    assert outcome.usage.completion_tokens == len(world.output("r")) == MOST
    world.assert_nothing_left()


def test_nobody_pays_for_a_surplus() -> None:
    world = ScriptedDeployment(2, 1, tenant_tokens_per_minute=PER_MINUTE)
    world.submit(request("r", tenant="t", max_new_tokens=MOST))
    world.prefilled("p0", "r", 10)
    world.joined("d0", "r")
    world.generated("d0", "r", 1, *(7,) * 10 * PER_MINUTE)
    world.submit(request("s", tenant="t"))
    assert world.outcome("s") is None, "the tenant has spent its tokens"


def test_a_worker_that_goes_on_giving_more_costs_the_request_its_attempts_and_no_more() -> None:
    world = ScriptedDeployment(1, 1, losses_max=3)
    world.submit(request("r", max_new_tokens=MOST))
    for attempt in (1, 2, 3):
        world.say("p0", Prefilled("r", attempt, 0, (7,) * 100, None, "length"))
        world.wait(world.core.settings.loss_seconds + 0.1)  # what fails together is one loss
    outcome = world.outcome("r")
    assert isinstance(outcome, RequestFailed)
    assert outcome.code == "attempts_exhausted"
    assert world.output("r") == []


WRONG: dict[str, dict[str, Any]] = {
    "another request": {"rid": "other"},
    "another attempt": {"attempt": 2},
    "another format": {"kv_format": "other"},
    "more tokens": {"kv_len": 300},
    "fewer tokens": {"kv_len": 1},
    "another prompt": {"prompt_len": 1},
    "no pages": {"pages": ()},
    "more pages": {"pages": (0, 1)},
}
WRONG_HOLDERS: dict[str, dict[str, Any]] = {
    "another worker": {"uid": "p1"},
    "an earlier process": {"epoch": 2},
    "another worker's agent": {"agent": agent_name("p1", 1)},
    "an agent of an earlier process": {"agent": agent_name("p0", 2)},
    "more metadata than any": {"metadata": bytes(METADATA_BYTES_MAX + 1)},
    "more metadata than any, of all ranks": {
        "ranks": (HolderRank("p0-1", bytes(METADATA_BYTES_MAX // 2 + 1), 0, 1, 1),) * 2
    },
}


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_HOLDERS])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_baton_that_cannot_be_the_requests_is_passed_to_nobody(wrong: str, role: str) -> None:
    world = ScriptedDeployment(2, 1) if role == "prefill" else decoding()
    if role == "prefill":
        world.submit(request("r"))
    peer, output_len = ("p0", 1) if role == "prefill" else ("d0", 2)
    sound = world.baton(peer, "r", 1, output_len)
    holder = replace(sound.holder, **WRONG_HOLDERS.get(wrong, {}))
    baton = replace(sound, holder=holder, **WRONG.get(wrong, {}))
    before = len(world.sent(Decode))
    world.say(peer, Prefilled("r", 1, 0, (10,), baton) if role == "prefill" else Migrating("r", 1, 2, baton))
    assert len(world.sent(Decode)) == before
    assert world.output("r") == ([] if role == "prefill" else [10, 11])
    (note,) = world.notes("fleet.unsound_baton")
    assert note.fields["worker"] == peer
    elsewhere(world, "baton")


@pytest.mark.parametrize("changed", [b"there", b""])
def test_where_a_worker_is_read_changes_in_no_session(changed: bytes) -> None:
    world = ScriptedDeployment(1, 1)

    def is_passed_on(rid: str, metadata: bytes) -> bool:
        """Whether a baton with this metadata goes to a decode worker."""
        world.submit(request(rid))
        sound = world.baton("p0", rid, 1, 1)
        baton = replace(sound, holder=replace(sound.holder, metadata=metadata))
        world.say("p0", Prefilled(rid, 1, 0, (10,), baton))
        return bool(world.sent(Decode, rid))

    assert [is_passed_on(rid, b"here") for rid in ("a", "b")] == [True, True]
    assert not is_passed_on("c", changed)
    (note,) = world.notes("fleet.unsound_baton")
    assert note.fields["worker"] == "p0"
    assert +world.core.counters.continuations == {"baton": 1}
    assert is_passed_on("d", b"here"), "what was refused is not remembered"
    world.down("p0")
    world.up("prefill", "p0")
    assert is_passed_on("e", changed), "another session may be of another process"


def test_a_sound_baton_passes_as_it_came() -> None:
    world = ScriptedDeployment()
    world.submit(request("r", prompt=(5,) * 40))
    pages = world.baton("p0", "r", 1, 1)
    world.say("p0", Prefilled("r", 1, 0, (10,), pages))
    assert [command.baton for _, command in world.sent(Decode)] == [pages]


def test_a_row_that_is_known_already_may_end_beyond_nothing() -> None:
    """A repeat is dropped as such, whatever its length."""
    world = decoding()
    world.say("d0", Generated((Row("r", 1, 0, (10, 11)),)))
    assert world.core.counters.dropped_messages == {"repeat": 1}
    assert world.state("r") == "decoding"
