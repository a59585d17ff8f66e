"""The chart's README has every value, with what values.yaml says of it."""

from __future__ import annotations

import base64
from functools import reduce
from operator import getitem

import yaml

from tests.tidy.chart_readme import PAGE, VALUES, page, rows
from tests.tidy.chart_schema import CHART

TEXT = """# Of the file, not of a value.

# -- What is served,
# or who.
model: small  # by name
group:  # of two
  # Above | it.
  first: []
  second: {a: 1}
  third:
    - x: 1
"""


def test_the_readme_of_the_chart_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


def test_a_row_has_path_default_and_both_comments() -> None:
    assert list(rows(TEXT)) == [
        '| `model` | `"small"` | What is served, or who. by name |',
        "| **group** | | of two |",
        "| `group.first` | `[]` | Above \\| it. |",
        '| `group.second` | `{"a": 1}` |  |',
        '| `group.third` | `[{"x": 1}]` |  |',
    ]


def test_every_value_has_its_row() -> None:
    text = VALUES.read_text(encoding="utf-8")
    named = {row.split("`")[1] for row in rows(text) if "`" in row.partition(" | ")[0]}
    values = yaml.safe_load(text)
    for path in named:
        reduce(getitem, path.split("."), values)  # it is there
    assert {path.partition(".")[0] for path in named} == values.keys()


def test_the_icon_in_the_metadata_is_the_file() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    head, _, data = chart["icon"].partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (CHART / "icon.svg").read_bytes()
