"""Constrained answers of a real deployment: they match, at temperature 1, and a killed worker changes none of them.

SEGUE_SCHEMAS says how many schemas are tried: a few by default, 500 before a release.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from typing import Any

import jsonschema
import openai
import pytest

from tests.integration.deployments.deployment import LocalDeployment
from tests.integration.deployments.observing import busy_worker, continuations
from tests.integration.deployments.streams import StreamedAnswer, client_of, complete
from tests.random_schemas import random_schema
from tests.waiting import until

SCHEMAS = int(os.environ.get("SEGUE_SCHEMAS", "16"))
AT_A_TIME = 8
MAX_TOKENS = 160
PROMPT = "A record of the expedition, as JSON: "
LARK = 'start: "(" inner ")"\ninner: /[0-9]{1,3}/ ("+" /[0-9]{1,3}/)*'
GBNF = 'root ::= "yes " | "no " tail\ntail ::= [a-f]+'
LONG = {  # some hundred tokens that must come, so that a worker can be killed in the middle
    "type": "array",
    "items": {"type": "string", "minLength": 5, "maxLength": 20},
    "minItems": 60,
    "maxItems": 60,
}


async def constrained(
    client: openai.AsyncOpenAI, seed: int, body: dict[str, Any], **params: Any
) -> StreamedAnswer:
    params = {"temperature": 1.0, "max_tokens": MAX_TOKENS} | params
    return await complete(client, PROMPT, seed=seed, extra_body=body, **params)


def answers(url: str, bodies: list[dict[str, Any]], **params: Any) -> list[StreamedAnswer]:
    """One answer to each, some at a time; the seed is the place in the list."""

    async def run() -> list[StreamedAnswer]:
        gate = asyncio.Semaphore(AT_A_TIME)
        async with client_of(url) as client:

            async def one(seed: int, body: dict[str, Any]) -> StreamedAnswer:
                async with gate:
                    return await constrained(client, seed, body, **params)

            return list(await asyncio.gather(*(one(seed, body) for seed, body in enumerate(bodies))))

    return asyncio.run(run())


def formats() -> jsonschema.FormatChecker:
    """Dates and times by their grammar in RFC 3339: any minute may have a leap second, and any year a 29th of February.

    What is more is arithmetic, which no grammar has.
    """
    strict = jsonschema.Draft202012Validator.FORMAT_CHECKER
    checker = jsonschema.FormatChecker()

    def by_grammar(kind: str) -> None:
        def check(value: object) -> bool:
            if not isinstance(value, str):
                return True
            return bool(strict.conforms(value.replace(":60", ":59").replace("-02-29", "-02-28"), kind))

        checker.checks(kind)(check)

    for kind in ("date", "time", "date-time"):
        by_grammar(kind)
    return checker


@pytest.mark.timeout(3600)
def test_every_answer_that_stops_is_of_its_schema(one_each: LocalDeployment) -> None:
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    found = answers(one_each.url, [{"structured_outputs": {"json": schema}} for schema in schemas])
    stopped = 0
    for schema, answer in zip(schemas, found, strict=True):
        if answer.finish_reason == "stop":
            stopped += 1
            jsonschema.Draft202012Validator(schema, format_checker=formats()).validate(
                json.loads(answer.text)
            )
    assert stopped > 0.7 * SCHEMAS


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_choice": ["north-west", "south (far)"]}, r"north-west|south \(far\)"),
        ({"regex": r"\d{3}-[a-f]{2,4}"}, r"[0-9]{3}-[a-f]{2,4}"),
        ({"ebnf": GBNF}, "yes |no [a-f]+"),
        ({"structured_outputs": {"grammar": LARK}}, r"\([0-9]{1,3}(\+[0-9]{1,3})*\)"),
    ],
)
def test_answers_match_what_was_asked_for(
    one_each: LocalDeployment, body: dict[str, Any], pattern: str
) -> None:
    for answer in answers(one_each.url, [body] * 4):
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text), answer
        else:
            assert answer.completion_tokens == MAX_TOKENS


def test_a_chat_answers_as_response_format_says(one_each: LocalDeployment) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = one_each.client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Is it so?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
        max_tokens=40,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "") in ({"ok": True}, {"ok": False})


@pytest.mark.aggregated
def test_an_answer_is_the_same_alone_and_in_company(one_each: LocalDeployment) -> None:
    body = {"structured_outputs": {"json": random_schema(1)}}
    others = [{"structured_outputs": {"json": random_schema(seed)}} for seed in range(2, 9)]
    assert answers(one_each.url, [body, *others])[0] == answers(one_each.url, [body])[0]


def test_min_tokens_yields_where_the_grammar_ends(one_each: LocalDeployment) -> None:
    (answer,) = answers(one_each.url, [{"regex": "abc", "min_tokens": 50}])
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


def test_a_grammar_that_ends_nowhere_is_an_error_of_its_request_alone(one_each: LocalDeployment) -> None:
    before = continuations(one_each)
    with pytest.raises(openai.BadRequestError) as raised:
        one_each.client.completions.create(
            model="smollm2", prompt=PROMPT, extra_body={"guided_json": {"$ref": "#"}}
        )
    assert raised.value.code == "grammar_too_complex"
    assert continuations(one_each) == before


def test_a_killed_decode_worker_changes_no_constrained_answer(two_each: LocalDeployment) -> None:
    body = {"structured_outputs": {"json": LONG}}
    (undisturbed,) = answers(two_each.url, [body], max_tokens=900)
    assert undisturbed.completion_tokens > 200
    before = continuations(two_each)

    async def disturbed() -> StreamedAnswer:
        pieces = 0
        victim: list[int] = []
        ready = asyncio.Event()

        def on_text() -> None:
            nonlocal pieces
            pieces += 1
            if pieces == 20:
                ready.set()

        async with client_of(two_each.url) as client:
            stream = asyncio.create_task(
                complete(client, PROMPT, on_text, seed=0, temperature=1.0, max_tokens=900, extra_body=body)
            )
            await ready.wait()
            victim.append((await asyncio.to_thread(busy_worker, two_each, "decode")).pid)
            os.kill(victim[0], signal.SIGKILL)
            return await stream

    assert asyncio.run(disturbed()) == undisturbed
    assert continuations(two_each) == before + 1
    until(two_each.all_linked, 60, "all workers' readiness")
