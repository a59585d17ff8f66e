"""Custom tools over HTTP: called with a text, in both APIs, streamed, in histories, and within their formats."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import openai
import pytest

from router.parsers.call_scanner import CustomInput
from tests.unit.router.openai.responses.test_responses import built, events, refusal, stable, whole
from tests.unit.router.openai.tools.agents import (
    PATCH,
    TOOLS,
    call,
    grammar_of,
    ignored,
    posted,
)
from tests.unit.router.openai.tools.test_tools_over_http import asked
from tests.unit.router.scripted_workers import MODEL, RunningRouter

# ---- the text of a custom tool, out of arguments in every cut --------------------------------------------------------


ODD_PATCH = '*** Begin Patch\n+\tprint("a\\\\b")\u2028日本 🙂🦊\x00\n*** End Patch'
CASES = {
    "a string": (json.dumps({"input": ODD_PATCH}), ODD_PATCH),
    "letters as they are": (json.dumps({"input": ODD_PATCH}, ensure_ascii=False), ODD_PATCH),
    "blanks": (' {\n "input" : "a b" }', "a b"),
    "the string alone": (json.dumps(ODD_PATCH), ODD_PATCH),
    "nothing": ('{"input": ""}', ""),
    "another name": ('{"patch": "a\\nb"}', "a\nb"),
    "two names": ('{"input": 5, "b": "c"}', '{"input": 5, "b": "c"}'),
    "a number": ("17", "17"),
    "no JSON": ("*** Begin Patch", "*** Begin Patch"),
    "half a pair": (r'{"input": "a\ud83d b\ude42"}', "a\ufffd b\ufffd"),
    "half a pair before an escape": (
        r'{"input": "\ud83d\n\ud83d\u0041\ud83d\ud83d\ude42"}',
        "\ufffd\n\ufffdA\ufffd🙂",
    ),
    "no escape": (r'{"input": "a\qb\u12x"}', r"a\qb\u12x"),
    "cut in an escape": (r'{"input": "a\u12', "a"),
    "cut in a pair": (r'{"input": "a\ud83d', "a"),
    "nothing at all": ("", ""),
}


@pytest.mark.parametrize(("arguments", "text"), CASES.values(), ids=CASES)
def test_the_text_is_the_same_in_every_cut(arguments: str, text: str) -> None:
    cuts = [[arguments], list(arguments)]
    cuts += [[arguments[:at], arguments[at:]] for at in range(len(arguments))]
    draw = random.Random(0)
    for _ in range(50):
        places = sorted(draw.sample(range(len(arguments) + 1), min(4, len(arguments))))
        edges = [0, *places, len(arguments)]
        cuts.append([arguments[a:b] for a, b in itertools.pairwise(edges)])
    for pieces in cuts:
        reader = CustomInput()
        told = [reader.push(piece) for piece in pieces]
        assert "".join(told) + reader.finish() == text, pieces
        json.dumps("".join(told)).encode()


def test_a_string_is_told_while_it_comes() -> None:
    reader = CustomInput()
    assert [reader.push(piece) for piece in ('{"input": "a', "b", "\\", 'n"', "}")] == [
        "a",
        "b",
        "",
        "\n",
        "",
    ]


LONG = {
    "a string of escapes": (['{"input": "', *["\\n"] * 100_000], 100_000),
    "blanks before it": (["{", *[" "] * 100_000, '"input": "a"}'], 0),
    "no string": (['{"a": [', *["1,"] * 100_000], 0),
}


@pytest.mark.parametrize(("pieces", "told"), LONG.values(), ids=LONG)
def test_a_long_text_costs_time_in_proportion(pieces: list[str], told: int) -> None:
    """No piece is read again with each that follows: as many of one token each would cost minutes."""

    def seconds(part: list[str]) -> float:
        reader = CustomInput()
        begun = time.process_time()
        pushed = sum(len(reader.push(piece)) for piece in part)
        reader.finish()
        assert pushed == (told and len(part) - 1)
        return time.process_time() - begun

    tenth = min(seconds(pieces[: len(pieces) // 10]) for _ in range(3))
    assert seconds(pieces) < 40 * tenth


@pytest.mark.parametrize("row", [1, 7, 1000], ids="{} tokens a message".format)
def test_a_custom_tool_is_called_with_a_text(router: RunningRouter, row: int) -> None:
    text = f"I patch: {call('apply_patch', input=PATCH)}\n{call('exec_command', cmd='ls')}\n"
    text += call("multi_agent_v1__note", input="b\n")
    router.says(text, row=row)
    answer = whole(router, tools=TOOLS)
    assert "by this lark grammar: start:" in router.prompt
    _, patch, command, note = answer["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (command["type"], json.loads(command["arguments"])) == ("function_call", {"cmd": "ls"})
    assert (note["name"], note["namespace"], note["input"]) == ("note", "multi_agent_v1", "b\n")
    found = events(router, tools=TOOLS)
    assert stable(found[-1]["response"]["output"]) == stable(answer["output"])
    assert [item["text"] for item in built(found)][1] == PATCH
    (done, *_) = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == PATCH


def test_a_custom_call_comes_back_in_the_history(router: RunningRouter) -> None:
    router.says(call("apply_patch", input=PATCH))
    (item,) = whole(router, tools=TOOLS)["output"]
    router.says("Done.")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    whole(router, tools=TOOLS, input=[{"role": "user", "content": "hi"}, item, result])
    shown = router.prompt
    assert f"<apply_patch {json.dumps({'input': PATCH}, ensure_ascii=False)}>" in shown
    assert f"ok of {item['call_id']}" in shown


def test_a_custom_tool_is_called_in_a_chat(client: openai.OpenAI, router: RunningRouter) -> None:
    within = {"name": "apply_patch", "description": "", "format": {"type": "text"}}
    tool: Any = {"type": "custom", "custom": within}
    router.says(call("apply_patch", input=PATCH))
    (choice,) = asked(client, tools=[tool]).choices
    (made,) = choice.message.tool_calls
    assert (made.type, made.custom.name, made.custom.input) == ("custom", "apply_patch", PATCH)
    assert choice.finish_reason == "tool_calls"
    pieces = [
        piece.model_dump(exclude_none=True)
        for chunk in asked(client, tools=[tool], stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "apply_patch")
    assert "".join(piece["custom"].get("input", "") for piece in pieces) == PATCH
    router.says("Done.")
    message = choice.message.model_dump(exclude_none=True)
    user: Any = {"role": "user", "content": "hi"}
    asked(client, user, message, {"role": "tool", "tool_call_id": made.id, "content": "ok"}, tools=[tool])
    assert f"<apply_patch {json.dumps({'input': PATCH}, ensure_ascii=False)}>" in router.prompt


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_a_regular_expression_of_a_custom_tool_is_kept(router: RunningRouter, path: str) -> None:
    def tool(syntax: str, definition: str) -> dict[str, Any]:
        grammar = {"syntax": syntax, "definition": definition}
        if path == "responses":
            return {"type": "custom", "name": "t", "format": {"type": "grammar", **grammar}}
        return {"type": "custom", "custom": {"name": "t", "format": {"type": "grammar", "grammar": grammar}}}

    where = "tools[0].format" if path == "responses" else "tools[0].custom.format"
    router.says("Hello")
    answer = posted(router, path, tools=[tool("regex", "[0-9]{2}")])
    assert (ignored(answer), "[0-9]{2}" in grammar_of(router)) == ([], True)
    answer = posted(router, path, tools=[tool("regex", "(?=a)b")])
    assert (ignored(answer), grammar_of(router)) == ([where], "")
    answer = posted(router, path, tools=[tool("lark", "start: /a/")])
    assert (ignored(answer), grammar_of(router)) == ([where], "")


@pytest.mark.parametrize(
    "given", [{"type": "grammar"}, {"type": "grammar", "syntax": "peg", "definition": "a"}, {"type": "x"}, 5]
)
def test_a_format_that_is_none_is_refused(router: RunningRouter, given: Any) -> None:
    error = refusal(router, tools=[{"type": "custom", "name": "t", "format": given}])
    assert error["param"] == "tools[0].format"


def test_a_stream_that_is_resumed_goes_on_within_a_custom_call(
    client: openai.OpenAI, router: RunningRouter
) -> None:
    del client
    tool = {"type": "custom", "custom": {"name": "apply_patch"}}
    router.says(call("apply_patch", input=PATCH))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool],
        "stream": True,
        "seed": 1,
    }
    headers = {"x-segue-resumable": "true"}
    first = router.http.post("/v1/chat/completions", json=body, headers=headers).text
    blocks = [block for block in first.split("\n\n") if block.startswith("id: ")]
    middle = len(blocks) // 2
    last = blocks[middle].split("\n")[0].removeprefix("id: ")
    rest = router.http.post(
        "/v1/chat/completions", json=body, headers={**headers, "last-event-id": last}, timeout=20
    ).text
    again = [block for block in rest.split("\n\n") if block.startswith("id: ")]
    assert _input(blocks[: middle + 1]) + _input(again) == PATCH


def _input(blocks: list[str]) -> str:
    text = ""
    for block in blocks:
        for choice in json.loads(block.split("data: ", 1)[1])["choices"]:
            for piece in choice["delta"].get("tool_calls", []):
                text += piece["custom"].get("input", "")
    return text
