"""`docs/api.md` is what the table of fields says."""

from __future__ import annotations

from tests.tidy.api_page import PAGE, page


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"
