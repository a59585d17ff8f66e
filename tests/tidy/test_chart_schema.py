"""The chart's schema knows the settings of the processes as they are."""

from __future__ import annotations

import json

import pytest

from shared.local.config import ROLE_CONFIGS
from shared.process.settings import schema_of
from shared.wire.messages import Role
from tests.tidy.chart_schema import NOT_IN_A_POD, SCHEMA, old_names, schema_text, set_by_the_chart


def test_the_schema_of_the_chart_is_fresh() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run: make docs"


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_every_setting_is_a_value_or_set_by_the_chart(role: Role) -> None:
    offered = set(json.loads(schema_text())["properties"][role]["properties"]["config"]["properties"])
    settings = set(schema_of(ROLE_CONFIGS[role])["properties"])
    assert offered | set_by_the_chart(ROLE_CONFIGS[role]) >= settings
    assert offered - set(old_names(offered)) <= settings


def test_what_is_left_out_exists() -> None:
    assert {
        name for model in ROLE_CONFIGS.values() for name in schema_of(model)["properties"]
    } >= NOT_IN_A_POD
