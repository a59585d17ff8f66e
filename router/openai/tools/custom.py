"""Custom tools, which take one text: what the model is told of the text, and the schema to which it is kept.

    format     the text
    text       is free
    regex      matches as a whole, if the pattern can be kept to
    lark       is free: a grammar's texts cannot be kept to within the quotes of JSON

A format that is not kept to is named in the answer's header; the model is shown it in each case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.openai.fields.ignored import Ignored
from router.openai.tools.structured_output import REGEX_FIELD_CHARACTERS_MAX, json_grammar
from router.parsers.custom_input import INPUT
from shared.grammar import limits
from shared.grammar.bounds import check_bounds, too_large
from shared.primitives.errors import RequestError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CustomSchema:
    """The schema of a custom tool's arguments. `kept`: it says more than that there is one text."""

    schema: Json
    described: str  # to the model
    kept: bool


def custom_schema(given: Any, param: str, ignored: Ignored) -> CustomSchema:
    """The schema of a `format`; raises `RequestError` naming what is wrong in it."""
    kind = given.get("type") if isinstance(given, dict) else "text" if given is None else None
    if kind == "text":
        return CustomSchema(_schema({}), "The whole text that the tool takes, as it is.", False)
    grammar = given.get("grammar", given) if kind == "grammar" else None
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError(
            f'{param} must be of type "text", or of type "grammar" with a syntax "lark" or "regex" and a definition',
            param=param,
        )
    if syntax == "regex" and len(definition) > REGEX_FIELD_CHARACTERS_MAX:
        raise too_large(param, "characters", len(definition), REGEX_FIELD_CHARACTERS_MAX)
    described = f"The whole text that the tool takes, by this {syntax} grammar: {definition}"
    if syntax == "regex":
        schema = _schema({"pattern": f"^(?:{definition})$"})
        alone = json_grammar(schema, param)
        check_bounds(alone, param)
        if not limits.problem(alone):
            return CustomSchema(schema, described, True)
    ignored.own(param)
    return CustomSchema(_schema({}), described, False)


def _schema(text: Json) -> Json:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string"} | text},
        "required": [INPUT],
        "additionalProperties": False,
    }
