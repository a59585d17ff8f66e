"""The page about a request's life shows the three tables as they are, and explains every state and event of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from decode import lifecycle as decode
from decode.lifecycle import DecodeEvent
from prefill import lifecycle as prefill
from prefill.lifecycle import PrefillEvent
from router.core.requests import lifecycle as router
from router.core.requests.lifecycle import RequestEvent

PAGE = Path(__file__).parents[2] / "docs" / "request-life.md"
DIAGRAMS = {
    "router": router.TRANSITIONS.diagram(),
    "prefill": prefill.TRANSITIONS.diagram(),
    "decode": decode.TRANSITIONS.diagram(),
}
WORDS: dict[str, Sequence[str]] = {  # of the states that a request does not end in, and of the events
    "router": [
        *(state.value for state in router.TRANSITIONS.rows if state not in router.TRANSITIONS.ended),
        *(event.value for event in RequestEvent),
    ],
    "prefill": [
        *(state.value for state in prefill.TRANSITIONS.rows if state not in prefill.TRANSITIONS.ended),
        *(event.value for event in PrefillEvent),
    ],
    "decode": [
        *(state.value for state in decode.TRANSITIONS.rows if state not in decode.TRANSITIONS.ended),
        *(event.value for event in DecodeEvent),
    ],
}


def with_diagrams(page: str) -> str:
    """The page with the picture of each table between its two marks."""
    for role, picture in DIAGRAMS.items():
        start, end = f"<!-- {role} table -->\n", f"<!-- end of {role} table -->\n"
        head, _, rest = page.partition(start)
        _, _, tail = rest.partition(end)
        page = f"{head}{start}```mermaid\n{picture}```\n{end}{tail}"
    return page


def test_the_pictures_are_made_from_the_tables() -> None:
    page = PAGE.read_text()
    assert page == with_diagrams(page), "run: python -m tests.tidy.test_request_life"


@pytest.mark.parametrize("role", DIAGRAMS)
def test_every_state_and_event_is_explained_beside_its_picture(role: str) -> None:
    _, _, chapter = PAGE.read_text().partition(f"<!-- end of {role} table -->\n")
    chapter, _, _ = chapter.partition("\n## On a")
    assert [word for word in WORDS[role] if f"| `{word}` |" not in chapter] == []


if __name__ == "__main__":
    PAGE.write_text(with_diagrams(PAGE.read_text()))
