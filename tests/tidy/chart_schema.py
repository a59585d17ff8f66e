"""Writes the three `config` sections of `charts/segue/values.schema.json` out of the structs that the processes read.

`python -m tests.tidy.chart_schema` (or `make docs`); a test compares the file with what this would write. All else in
that file is written by hand. A setting that a template hands to a process as a variable is left out: the variable
would win over the config file, silently.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from shared.process.settings import ProcessConfig, schema_of, variable_of

CHART = Path(__file__).parents[2] / "charts" / "segue"
SCHEMA = CHART / "values.schema.json"
ROLE_STRUCTS: dict[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
NOT_IN_A_POD = {
    "lifeline_fd",
    "namespace",
    "workers",
}  # a parent's pipe; another namespace's Role; static discovery


def variables_of_the_chart() -> set[str]:
    """Names of the `SEGUE_*` variables that the templates set."""
    templates = (file.read_text(encoding="utf-8") for file in (CHART / "templates").glob("*.*"))
    return {name for text in templates for name in re.findall(r"- name: (SEGUE_\w+)", text)}


def config_section(struct: type[ProcessConfig]) -> dict[str, Any]:
    """JSON schema of what a person may write into one role's `config`."""
    taken = variables_of_the_chart()
    properties = schema_of(struct)["$defs"][struct.__name__]["properties"]
    return {
        "type": "object",
        "additionalProperties": False,
        "description": "Settings of the process. Written by `make docs`.",
        "properties": {
            field.encode_name: properties[field.encode_name]
            for field in msgspec.structs.fields(struct)
            if variable_of(field.name) not in taken and field.name not in NOT_IN_A_POD
        },
    }


def schema_text() -> str:
    """The whole file, with fresh `config` sections."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for role, struct in ROLE_STRUCTS.items():
        schema["properties"][role]["properties"]["config"] = config_section(struct)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
