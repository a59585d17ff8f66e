"""Streams that go on behind an event's id, at any router of the deployment, and requests that are sent twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.openai.answers.response_stream import TextDelta
from router.openai.answers.resumable_streams import (
    IDEMPOTENCY_KEY_CHARS_MAX,
    IDEMPOTENCY_KEYS_MAX,
    IDEMPOTENCY_SECONDS,
    RESUMABLE_CHOICES_MAX,
    ChoicePlace,
    Resuming,
    StreamHeaders,
    StreamIds,
    StreamMarks,
    StreamPlan,
    StreamTicket,
    event_id,
    stream_marks,
)
from router.parsers.answer_deltas import AnswerDelta
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.messages import Prefill
from tests.unit.router.scripted_workers import MODEL, RunningRouter, Script
from tests.unit.router.tiny_model import END_ID

TEXT = "Héllo 日本 🙂🦊, the quick brown fox."
RESUMABLE = {"x-segue-resumable": "true"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "fox", "max_tokens": 100, "stream": True}


@dataclass(frozen=True)
class Event:
    id: str
    data: str

    def texts(self) -> dict[int, str]:
        choices = json.loads(self.data)["choices"] if self.data != "[DONE]" else []
        return {
            each["index"]: each.get("text", "") or (each.get("delta") or {}).get("content") or ""
            for each in choices
        }


@pytest.fixture(scope="module")
def routers(model_folder: Path) -> Iterator[tuple[RunningRouter, RunningRouter]]:
    """Two of one deployment."""
    with RunningRouter(model_folder) as one, RunningRouter(model_folder) as other:
        tokenizer = Tokenizer(model_folder, template_seconds_max=5)

        def output(prefill: Prefill) -> tuple[int, ...]:
            return (
                *tokenizer.encode(f"{prefill.params.seed}: {TEXT}", add_special_tokens=False),
                END_ID,
            )

        one.workers.script = Script(output=output, tokens_a_row=1)
        other.workers.script = Script(output=output, tokens_a_row=3)
        yield one, other


def post(router: RunningRouter, body: dict[str, Any], headers: dict[str, str]) -> httpx2.Response:
    path = "chat/completions" if "messages" in body else "completions"
    return router.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)


def events(router: RunningRouter, body: dict[str, Any], headers: dict[str, str]) -> list[Event]:
    response = post(router, body, headers)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            found.append(Event(fields.get("id", ""), fields["data"]))
    return found


def texts_of(several: list[Event]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in several:
        for index, text in event.texts().items():
            texts[index] = texts.get(index, "") + text
    return texts


@pytest.mark.parametrize(
    "body", [CHAT, COMPLETION, CHAT | {"n": 3, "seed": 7}, COMPLETION | {"stop": "brown"}]
)
def test_a_stream_goes_on_behind_any_of_its_events_at_another_router(
    routers: tuple[RunningRouter, RunningRouter], body: dict[str, Any]
) -> None:
    one, other = routers
    body = body | {"stream_options": {"include_usage": True}}
    before = other.resuming.counters.resumed
    whole = events(one, body, RESUMABLE)
    marked = [event for event in whole if event.id]
    assert len(marked) > 10
    for cut, event in enumerate(marked, 1):
        rest = events(other, body, {"last-event-id": event.id})
        assert rest[-1].data == "[DONE]"
        both = [*marked[:cut], *rest]
        assert texts_of(both) == texts_of(whole)
        ends = [
            choice["finish_reason"] for each in both for choice in _choices(each) if choice["finish_reason"]
        ]
        assert ends == ["stop"] * body.get("n", 1), "each choice ends once"
        roles = [choice for each in both for choice in _choices(each) if "role" in choice.get("delta", {})]
        assert len(roles) == (body.get("n", 1) if "messages" in body else 0), "each choice is opened once"
        heads = {(json.loads(each.data)["id"], json.loads(each.data)["created"]) for each in both[:-1]}
        assert len(heads) == 1, "it is one answer to its client"
    assert other.resuming.counters.resumed == before + len(marked)


def _choices(event: Event) -> list[dict[str, Any]]:
    return [] if event.data == "[DONE]" else json.loads(event.data)["choices"]


def test_a_resumed_stream_can_be_resumed_again(routers: tuple[RunningRouter, RunningRouter]) -> None:
    one, other = routers
    whole = events(one, COMPLETION, RESUMABLE)
    first = whole[:5]
    second = events(other, COMPLETION, {"last-event-id": first[-1].id})[:3]
    third = events(one, COMPLETION, {"last-event-id": second[-1].id})
    assert texts_of([*first, *second, *third]) == texts_of(whole)


def test_a_stream_that_did_not_ask_is_as_before(routers: tuple[RunningRouter, RunningRouter]) -> None:
    assert not any(event.id for event in events(routers[0], COMPLETION, {}))
    assert not any(event.id for event in events(routers[0], COMPLETION, {"x-segue-resumable": "false"}))
    plain = post(routers[0], COMPLETION | {"seed": 1}, {}).text
    assert "id: " not in plain.replace('"id": ', "")


def refused(
    router: RunningRouter, body: dict[str, Any], headers: dict[str, str]
) -> tuple[int, str | None, str]:
    response = post(router, body, headers)
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def test_what_cannot_be_resumed_is_refused_by_name(
    routers: tuple[RunningRouter, RunningRouter],
) -> None:
    one, other = routers
    last = events(one, COMPLETION, RESUMABLE)[3].id
    behind = {"last-event-id": last}
    assert refused(other, COMPLETION | {"max_tokens": 99}, behind)[:2] == (422, "another_request")
    assert refused(other, CHAT, behind)[:2] == (422, "another_request")
    places, _, ticket = last.partition(".")
    forged = [
        f"{places}.{ticket[:-4]}AAAA",
        f"{places}.",
        ticket,
        "x.y",
        f"a.{ticket}",
        "é.ü",
        "9" * 5000 + last,
    ]
    for text in forged:
        encoded = {"last-event-id": text.encode("latin-1")}
        assert refused(other, COMPLETION, encoded)[:2] == (400, "invalid_event_id"), text  # type: ignore[arg-type]
    whole = COMPLETION | {"stream": False}
    assert "stream: true" in refused(one, whole, RESUMABLE)[2]
    assert "single tokens" in refused(one, COMPLETION | {"return_token_ids": True}, RESUMABLE)[2]
    assert "X-Segue-Resumable" in refused(one, COMPLETION, {"x-segue-resumable": "30"})[2]
    other_choices = {"last-event-id": f"1,2.{ticket}"}
    assert refused(other, COMPLETION, other_choices)[:2] == (422, "another_request")


def test_what_computes_otherwise_does_not_go_on(routers: tuple[RunningRouter, RunningRouter]) -> None:
    one, _ = routers
    ids = StreamIds(b"the secret of all routers")
    last = events(one, COMPLETION, RESUMABLE)[3].id
    ticket, places = ids.read(last)
    signed = ids.signed(
        StreamTicket(ticket.rid, ticket.created, ticket.seed, ticket.request, "fp of an older engine")
    )
    status, code, _ = refused(one, COMPLETION, {"last-event-id": event_id(places, signed)})
    assert (status, code) == (409, "stream_not_resumable")


def test_only_routers_of_one_deployment_read_each_others_ids() -> None:
    ticket = StreamTicket("r", 1, -5, bytes(16), "fp")
    mine, yours = StreamIds(b"one"), StreamIds(b"another")
    written = event_id([ChoicePlace(), ChoicePlace(0), ChoicePlace(12, True)], mine.signed(ticket))
    assert mine.read(written) == (ticket, [ChoicePlace(), ChoicePlace(0), ChoicePlace(12, True)])
    with pytest.raises(RequestError):
        yours.read(written)


def test_thoughts_and_calls_go_on_where_they_were_cut() -> None:
    pieces = [
        TextDelta(0, "", reasoning="Let me"),
        TextDelta(0, "", reasoning=" think."),
        TextDelta(0, "I will ", reasoning=" So"),
        TextDelta(0, "look.", calls=(AnswerDelta("call", "find", 0), AnswerDelta("arguments", '{"a"', 0))),
        TextDelta(0, "", calls=(AnswerDelta("arguments", ": 1}", 0), AnswerDelta("call", "go", 1))),
        TextDelta(0, "", "tool_calls", calls=(AnswerDelta("arguments", "{}", 1),)),
    ]
    ids, ticket = StreamIds(b"secret"), StreamTicket("r", 1, 1, bytes(16), "fp")
    whole = _told(pieces)
    marks = StreamMarks(ids.signed(ticket), [ChoicePlace()])
    lines = [marks.written(part) for piece in pieces if (part := marks.unread(piece))]
    for cut, line in enumerate(lines, 1):
        _, places = ids.read(line.decode().removeprefix("id: ").strip())
        for together in (1, 2, len(pieces)):  # the second time events fall together otherwise
            groups = [joined(pieces[at : at + together]) for at in range(0, len(pieces), together)]
            again = StreamMarks(ids.signed(ticket), places)
            rest = [part for piece in groups if (part := again.unread(piece))]
            assert _told([*pieces[:cut], *rest]) == whole


def joined(pieces: list[TextDelta]) -> TextDelta:
    """All pieces of a choice as one."""
    texts, thoughts = zip(*((piece.text, piece.reasoning) for piece in pieces), strict=True)
    calls = tuple(call for piece in pieces for call in piece.calls)
    return TextDelta(0, "".join(texts), pieces[-1].finish_reason, reasoning="".join(thoughts), calls=calls)


def _told(pieces: list[TextDelta]) -> tuple[str, str, list[str], list[str | None]]:
    calls: list[str] = []
    for part in (part for piece in pieces for part in piece.calls):
        if part.kind == "call":
            calls.append(f"{part.text}:")
        else:
            calls[-1] += part.text
    ends = [piece.finish_reason for piece in pieces if piece.finish_reason]
    text, thoughts = ("".join(words) for words in zip(*((p.text, p.reasoning) for p in pieces), strict=True))
    return text, thoughts, calls, list(ends)


def test_an_idempotency_key_gives_the_same_answer_at_every_router(
    routers: tuple[RunningRouter, RunningRouter],
) -> None:
    one, other = routers
    body = COMPLETION | {"stream": False}

    def text(router: RunningRouter, key: str, **fields: Any) -> str:
        response = post(router, body | fields, {"idempotency-key": key})
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    before = one.resuming.counters.repeated
    answers = {text(router, "order 17") for router in (one, other, one)}
    assert len(answers) == 1
    assert one.resuming.counters.repeated == before + 1
    assert text(one, "order 18") not in answers
    assert text(one, "order 19", seed=5).startswith("5: "), "a seed in the body counts"
    status, code, _ = refused(one, body | {"prompt": "dog"}, {"idempotency-key": "order 17"})
    assert (status, code) == (422, "idempotency_key_reused")
    assert refused(one, body, {"idempotency-key": "x" * (IDEMPOTENCY_KEY_CHARS_MAX + 1)})[0] == 400


def test_idempotency_keys_are_remembered_for_a_while_and_in_a_bounded_number() -> None:
    resuming = Resuming(b"secret")

    def come(key: str, digest: bytes, now: float) -> None:
        resuming.remember(StreamHeaders("", idempotency_key=key), "t", StreamPlan(digest=digest), now)

    come("k", b"a", 0.0)
    with pytest.raises(RequestError):
        come("k", b"b", IDEMPOTENCY_SECONDS - 1)
    come("k", b"b", IDEMPOTENCY_SECONDS)
    for number in range(2 * IDEMPOTENCY_KEYS_MAX):
        come(f"key {number}", b"a", IDEMPOTENCY_SECONDS)
    assert len(resuming._idempotent) == IDEMPOTENCY_KEYS_MAX


def test_a_stream_of_too_many_choices_gets_no_ids() -> None:
    plan = StreamPlan(1, StreamTicket("r", 1, 1, bytes(16), "fp"), "ticket")
    assert stream_marks(plan, RESUMABLE_CHOICES_MAX) is not None
    with pytest.raises(RequestError, match="at most 64 choices"):
        stream_marks(plan, RESUMABLE_CHOICES_MAX + 1)


def test_a_tenant_with_many_idempotency_keys_pushes_out_its_own() -> None:
    resuming = Resuming(b"secret")
    modest = StreamHeaders("modest", idempotency_key="mine")
    resuming.remember(modest, "modest", StreamPlan(digest=b"one"), 0.0)
    for number in range(IDEMPOTENCY_KEYS_MAX + 100):
        greedy = StreamHeaders("greedy", idempotency_key=str(number))
        resuming.remember(greedy, "greedy", StreamPlan(digest=b"one"), 1.0)
    assert len(resuming._idempotent) == len(resuming._of_tenants) == IDEMPOTENCY_KEYS_MAX
    with pytest.raises(RequestError, match="came with another request"):
        resuming.remember(modest, "modest", StreamPlan(digest=b"two"), 2.0)
