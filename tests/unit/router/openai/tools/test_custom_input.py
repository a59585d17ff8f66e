"""The text of a custom tool, out of arguments in every cut."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest

from router.parsers.call_scanner import CustomInput

PATCH = '*** Begin Patch\n+\tprint("a\\\\b")\u2028日本 🙂🦊\x00\n*** End Patch'
CASES = {
    "a string": (json.dumps({"input": PATCH}), PATCH),
    "letters as they are": (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
    "blanks": (' {\n "input" : "a b" }', "a b"),
    "the string alone": (json.dumps(PATCH), PATCH),
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
