"""The page about a request's life shows the table as it is, and explains every state and event of it."""

from __future__ import annotations

from pathlib import Path

from router.core.lifecycle import TABLE, RequestEvent, RequestState

PAGE = Path(__file__).parents[2] / "docs" / "request-life.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"


def with_diagram(page: str) -> str:
    """The page with the picture of the table between its two marks."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}```mermaid\n{TABLE.diagram()}```\n{END}{tail}"


def test_the_picture_is_made_from_the_table() -> None:
    page = PAGE.read_text()
    assert page == with_diagram(page), "run: python -m tests.tidy.test_request_life"


def test_every_state_and_event_is_explained() -> None:
    page = PAGE.read_text()
    for state in set(RequestState) - TABLE.ended:
        assert f"| `{state.value}` |" in page
    for event in RequestEvent:
        assert f"| `{event.value}` |" in page


if __name__ == "__main__":
    PAGE.write_text(with_diagram(PAGE.read_text()))
