"""The chart's schema knows the settings of the processes as they are."""

from __future__ import annotations

import json

from shared.process.settings import variable_of
from tests.tidy.chart_schema import NOT_IN_A_POD, ROLE_STRUCTS, SCHEMA, schema_text, variables_of_the_chart


def test_the_schema_of_the_chart_is_fresh() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run: make docs"


def test_every_setting_is_a_value_or_set_by_the_chart() -> None:
    sections = json.loads(schema_text())["properties"]
    for role, struct in ROLE_STRUCTS.items():
        offered = sections[role]["properties"]["config"]["properties"]
        elsewhere = [
            field
            for field in struct.__struct_fields__
            if variable_of(field) in variables_of_the_chart() or field in NOT_IN_A_POD
        ]
        assert len(offered) + len(elsewhere) == len(struct.__struct_fields__)


def test_what_is_left_out_exists() -> None:
    fields = {field for struct in ROLE_STRUCTS.values() for field in struct.__struct_fields__}
    assert fields >= NOT_IN_A_POD
