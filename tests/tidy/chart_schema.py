"""Writes the three `config` sections of `charts/segue/values.schema.json` out of the models that the processes read.

`python -m tests.tidy.chart_schema` (or `make docs`); a test compares the file with what this would write. All else in
that file is written by hand. A setting that a template hands to a process as a variable is left out: the variable
would win over the config file, silently. Old names of settings are let through, for a template refuses them in a
sentence that has the new name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from shared.local.config import ROLE_CONFIGS
from shared.process import settings
from shared.process.settings import Settings, schema_of, variable_of

CHART = Path(__file__).parents[2] / "charts" / "segue"
SCHEMA = CHART / "values.schema.json"
NOT_IN_A_POD = {
    "adminHost",  # the kubelet asks at the pod's address
    "killTokenFile",  # a parent's, with the pipe
    "killWorkerFd",  # a parent's pipe
    "lifelineFd",  # a parent's pipe
    "namespace",  # another namespace's Role
    "workers",  # static discovery
}


def variables_of_the_chart() -> set[str]:
    """Names of the `SEGUE_*` variables that the templates set."""
    templates = (file.read_text(encoding="utf-8") for file in (CHART / "templates").glob("*.*"))
    return {name for text in templates for name in re.findall(r"- name: (SEGUE_\w+)", text)}


def set_by_the_chart(model: type[Settings]) -> set[str]:
    """Settings, in camelCase, that nobody may write into a `config`."""
    variables = variables_of_the_chart()
    return NOT_IN_A_POD | {to_camel(name) for name in model.model_fields if variable_of(name) in variables}


def config_section(model: type[Settings]) -> dict[str, Any]:
    """JSON schema of what a person may write into one role's `config`."""
    properties = schema_of(model)["properties"]
    offered = {
        name: {key: value for key, value in property_.items() if key != "title"}
        for name, property_ in properties.items()
        if name not in set_by_the_chart(model)
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "description": "Settings of the process. Written by `make docs`.",
        "properties": offered | old_names(offered),
    }


def old_names(offered: Container[str]) -> dict[str, Any]:
    """The former names of settings that are `offered`."""
    told = {old: (new, f"is called {to_camel(new)} now") for old, new in settings.FORMER_SETTINGS.items()}
    return {
        to_camel(old): {"deprecated": True, "description": f"Refused: it {why}."}
        for old, (beside, why) in {**told, **settings.GONE_SETTINGS}.items()
        if to_camel(beside) in offered
    }


def schema_text() -> str:
    """The whole file, with fresh `config` sections."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for role, model in ROLE_CONFIGS.items():
        schema["properties"][role]["properties"]["config"] = config_section(model)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
