"""The reference page is what the code says, and says all of it."""

from __future__ import annotations

from shared.process.metrics import GAUGES
from tests.tidy.reference import PAGE, names, page
from tests.tidy.source_files import source_files


def test_the_reference_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_reference_names_every_setting_metric_and_message() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in names() if f"`{name}`" not in text] == []


def test_every_gauge_is_set_by_somebody() -> None:
    setting = [f.text.partition("class Metrics")[2] or f.text for f in source_files() if f.shipped]
    assert [gauge.name for gauge in GAUGES if not any(f'"{gauge.name}"' in text for text in setting)] == []
