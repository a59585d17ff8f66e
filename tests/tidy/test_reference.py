"""The reference page is what the code says, and says all of it."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.reference import COUNTERS, PAGE, declared_gauges, names, page
from tests.tidy.source_files import source_files


@pytest.mark.torch
def test_the_reference_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_the_reference_names_every_setting_metric_and_message() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in names() if f"`{name}`" not in text] == []


def test_every_gauge_is_set_by_somebody() -> None:
    shipped = [f.text for f in source_files() if f.shipped]
    constants = [f"gauges.{constant}," for constant in declared_gauges().values()]
    assert [constant for constant in constants if not any(constant in text for text in shipped)] == []


def test_gauges_are_declared_in_one_file() -> None:
    declaring = {f.path for f in source_files() if f.shipped and "GaugeMetric(" in f.text}
    assert declaring == {"shared/primitives/metric_fields.py", "shared/process/gauges.py"}


def test_every_counter_class_is_published_and_checked() -> None:
    defined = {
        cls.name for f in source_files() if f.shipped for cls in f.classes() if cls.name.endswith("Counters")
    }
    assert defined == {ancestor.__name__ for counters in COUNTERS for ancestor in counters.__mro__[:-1]}


def test_counters_are_declared_in_counter_classes_only() -> None:
    helpers = {
        "counted",
        "counted_by",
        "counted_by_labels",
        "observed",
        "total",
        "durations",
        "durations_of_requests",
    }
    using = {
        cls.name
        for f in source_files()
        if f.shipped
        for cls in f.classes()
        for node in ast.walk(cls)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers
    }
    assert [name for name in using if not name.endswith("Counters")] == []
