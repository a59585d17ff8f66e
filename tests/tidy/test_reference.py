"""The reference page is what the code says, and says all of it."""

from __future__ import annotations

from tests.tidy.reference import PAGE, names, page


def test_the_reference_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_reference_names_every_setting_metric_and_message() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in names() if f"`{name}`" not in text] == []
