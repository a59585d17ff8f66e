"""A command that nobody could carry out costs its own request: the worker refuses it and goes on with the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.wire.baton import agent_name
from shared.wire.messages import Decode, Generated, Prefill, Prefilled, Refused, decode_from_router, encode
from tests.unit.decode.bench import DecodeBench
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import HOLDER, VOCAB_SIZE, decode, prefill, prompt

PROMPT = prompt(8)
UNSOUND: dict[str, dict[str, Any]] = {
    "no tokens": {"token_ids": (), "prompt_len": 0},
    "a prompt longer than its tokens": {"prompt_len": 10},
    "a prompt of less than nothing": {"prompt_len": -1},
    "a token below the first": {"token_ids": (-1, *prompt(8))},
    "a token beyond the last": {"token_ids": (*prompt(8), VOCAB_SIZE)},
}
UNSOUND_PARAMS: dict[str, dict[str, Any]] = {
    "a temperature that is no number": {"temperature": float("nan")},
    "a bias for a token that is not there": {"logit_bias": {VOCAB_SIZE: 1.0}},
    "a repetition penalty of nothing": {"repetition_penalty": 0.0},
}
UNSOUND_BATONS: dict[str, dict[str, Any]] = {
    "too few pages": {"pages": (0,)},
    "too many pages": {"pages": (0, 1, 2)},
    "a page below the first": {"pages": (0, -1)},
    "a page beyond any memory": {"pages": (0, 2**62)},
    "no lease": {"lease": -1},
    "no nonce": {"nonce": 0},
    "a lease beyond any memory": {"lease": 2**62},
    "a holder below the first address": {"holder": msgspec.structs.replace(HOLDER, pages_address=-64)},
    "a holder with words beyond any memory": {"holder": msgspec.structs.replace(HOLDER, words_address=2**63)},
    "a holder with the agent of another": {
        "holder": msgspec.structs.replace(HOLDER, agent=agent_name("prefill-1", 7))
    },
    "a holder with pages of no bytes": {"holder": msgspec.structs.replace(HOLDER, page_bytes=0)},
    "a known page beyond any memory": {"holder": msgspec.structs.replace(HOLDER, known_page=2**62)},
}


def altered(command: Any, changes: dict[str, Any], params: dict[str, Any]) -> Any:
    changed = msgspec.structs.replace(command.params, **params)
    return msgspec.structs.replace(command, params=changed, **changes)


ALTERED: list[tuple[dict[str, Any], dict[str, Any]]] = [(changes, {}) for changes in UNSOUND.values()] + [
    ({}, params) for params in UNSOUND_PARAMS.values()
]


@pytest.mark.parametrize(("changes", "params"), ALTERED, ids=[*UNSOUND, *UNSOUND_PARAMS])
def test_a_prefill_worker_refuses_what_it_cannot_compute(
    changes: dict[str, Any], params: dict[str, Any]
) -> None:
    bench = PrefillBench()
    unsound: Prefill = altered(prefill("odd", PROMPT), changes, params)
    bench.send(unsound, prefill("plain", PROMPT))
    bench.run()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("odd", "internal")]
    assert [said.rid for said in bench.said(Prefilled)] == ["plain"]


@pytest.mark.parametrize(("changes", "params"), ALTERED, ids=[*UNSOUND, *UNSOUND_PARAMS])
def test_a_decode_worker_refuses_what_it_cannot_continue(
    changes: dict[str, Any], params: dict[str, Any]
) -> None:
    unsound: Decode = altered(decode("odd", PROMPT), changes, params)
    baton = msgspec.structs.replace(unsound.baton, kv_len=len(unsound.token_ids) - 1)
    assert_refused(msgspec.structs.replace(unsound, baton=baton))


@pytest.mark.parametrize("changes", UNSOUND_BATONS.values(), ids=UNSOUND_BATONS)
def test_a_decode_worker_refuses_a_baton_that_no_worker_made(changes: dict[str, Any]) -> None:
    sound = decode("odd", PROMPT)
    assert_refused(msgspec.structs.replace(sound, baton=msgspec.structs.replace(sound.baton, **changes)))


def assert_refused(unsound: Decode) -> None:
    """This command alone is refused, and a stream beside it goes on to its end; or no link lets it through."""
    bench = DecodeBench()
    if not is_within_bounds(unsound):
        return
    bench.send(unsound, decode("plain", PROMPT))
    bench.run()
    assert [(said.rid, said.reason) for said in bench.said(Refused)] == [("odd", "internal")]
    assert {row.rid for said in bench.said(Generated) for row in said.rows} == {"plain"}
    assert bench.holds_nothing


def is_within_bounds(command: Decode) -> bool:
    """Whether a worker's link decodes the command: numbers beyond their bounds end the session (`bounds`)."""
    try:
        decode_from_router["decode"](encode(command))
    except msgspec.ValidationError:
        return False
    return True


def test_what_the_worker_itself_has_to_refuse_is_within_the_bounds_of_numbers() -> None:
    sound = decode("odd", PROMPT)
    batons = {
        name: msgspec.structs.replace(sound, baton=msgspec.structs.replace(sound.baton, **changes))
        for name, changes in UNSOUND_BATONS.items()
    }
    assert {name for name, command in batons.items() if is_within_bounds(command)} == {
        "too few pages",
        "too many pages",
        "a holder with the agent of another",
        "a holder with pages of no bytes",
    }
