"""What fields of three APIs ask of an answer becomes one grammar, or an error that names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.openai.fields.generation_fields import ChatFields, CompletionFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.table import read_by_table
from router.openai.tools.structured_output import (
    CHOICES_MAX,
    GBNF_CHARACTERS_MAX,
    REGEX_FIELD_CHARACTERS_MAX,
    asked_grammar,
)
from shared.limits import grammars
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KEPT = SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}
GBNF = 'root ::= "a" | b\nb ::= [a-z]+'
LARK = 'start: "a" | "b"'
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


def chat(**fields: Any) -> ChatFields:
    body = json.dumps({"model": "m", "messages": []} | fields).encode()
    return read_by_table(body, "chat", ChatFields, Ignored())


def asked(**fields: Any) -> Grammar:
    grammar = asked_grammar(chat(**fields), Ignored())
    assert grammar is not None
    return grammar


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        asked_grammar(chat(**fields), Ignored())
    assert raised.value.status == 400
    return raised.value


def decoded(grammar: Grammar) -> Any:
    assert grammar.kind == "json"
    return json.loads(grammar.text)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_is_the_same_in_every_spelling(fields: dict[str, Any]) -> None:
    assert decoded(asked(**fields)) == KEPT


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(fields: dict[str, Any]) -> None:
    assert decoded(asked(**fields))["type"] == "object"


def test_any_object_may_have_a_schema_as_llama_cpp_and_together_take_it() -> None:
    lenient = {"whitespace_pattern": " ?", "lenient": True, "coerce_one_of": True}
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        found = asked(response_format={"type": "json_object", "schema": schema})
        assert decoded(found) == SCHEMA | {"x-guidance": lenient}
    nothing: list[Any] = [{}, None]
    for one in nothing:
        assert decoded(asked(response_format={"type": "json_object", "schema": one}))["type"] == "object"
    assert refusal(response_format={"type": "json_object", "schema": 7}).param == "response_format.schema"


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"regex": r"\d+"}}, {"guided_regex": r"\d+"}, {"regex": r"\d+"}]
)
def test_digits_are_ten(fields: dict[str, Any]) -> None:
    assert asked(**fields) == Grammar("regex", "[0-9]+")


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"choice": ["a.b", "c"]}}, {"guided_choice": ["a.b", "c"]}]
)
def test_choices_are_texts_and_no_expressions(fields: dict[str, Any]) -> None:
    assert asked(**fields) == Grammar("regex", r"(a\.b|c)")


@pytest.mark.parametrize("name", ["ebnf", "guided_grammar"])
def test_gbnf_becomes_lark_and_lark_stays(name: str) -> None:
    assert asked(**{name: LARK}) == Grammar("lark", LARK)
    converted = asked(**{name: GBNF})
    assert converted.kind == "lark"
    assert "start" in converted.text
    assert asked(structured_outputs={"grammar": GBNF}) == converted


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": TAGS},
        {"structural_tag": json.dumps(TAGS)},
        {"structured_outputs": {"structural_tag": TAGS}},
    ],
)
def test_tags_become_lark(fields: dict[str, Any]) -> None:
    grammar = asked(**fields)
    assert grammar.kind == "lark"
    assert '"<f="' in grammar.text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_what_asks_for_nothing_is_free(fields: dict[str, Any]) -> None:
    assert asked_grammar(chat(**fields), Ignored()) is None


def test_a_completion_is_constrained_alike() -> None:
    body = {"model": "m", "prompt": "fox", "response_format": {"type": "json_object"}}
    fields = read_by_table(json.dumps(body).encode(), "completions", CompletionFields, Ignored())
    assert asked_grammar(fields, Ignored()) is not None


UNKEPT: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"if": {}, "then": {}},
    "oneOf": {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 9}]},
    "format": {"type": "string", "format": "password"},
    "contains": {"type": "array", "contains": {}},
    "propertyNames": {"type": "object", "propertyNames": {"type": "string"}},
    "pattern": {"type": "string", "pattern": r"^(?!\.)[a-z.]+$"},
}


def as_format(schema: dict[str, Any], **described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **described}}


@pytest.mark.parametrize(("keyword", "schema"), UNKEPT.items(), ids=UNKEPT)
def test_a_keyword_that_cannot_be_kept_is_refused_of_a_strict_schema(
    keyword: str, schema: dict[str, Any]
) -> None:
    error = refusal(response_format=as_format(schema, strict=True))
    assert keyword in str(error) or "look-around" in str(error)
    assert (error.param, error.code) == ("response_format", "invalid_grammar")


@pytest.mark.parametrize("described", [{}, {"strict": False}, {"strict": None}], ids=str)
@pytest.mark.parametrize(("keyword", "schema"), UNKEPT.items(), ids=UNKEPT)
def test_a_keyword_that_cannot_be_kept_is_told_of_a_schema_that_is_not_strict(
    keyword: str, schema: dict[str, Any], described: dict[str, Any]
) -> None:
    ignored = Ignored()
    within = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = asked_grammar(chat(response_format=as_format(within, **described)), ignored)
    assert grammar is not None
    assert grammars.problem(grammar) == ""
    ((_, names),) = ignored.headers
    assert f"response_format.{keyword}" in names.decode().split(", ")


def test_a_schema_that_is_kept_whole_is_told_nothing_of() -> None:
    ignored = Ignored()
    assert asked_grammar(chat(response_format=as_format(SCHEMA)), ignored) is not None
    assert list(ignored.headers) == []


def test_a_schema_that_refers_elsewhere_is_refused_without_strictness_too() -> None:
    assert "http://x/y" in str(refusal(response_format=as_format({"$ref": "http://x/y"})))


def test_a_slip_beside_a_schema_is_no_silence() -> None:
    described = {"name": "a", "strct": True, "schema": {"type": "object"}}
    error = refusal(response_format={"type": "json_schema", "json_schema": described})
    assert str(error) == "response_format.json_schema.strct is not a field; did you mean strict?"


def test_options_of_the_library_are_not_the_clients() -> None:
    schema = {"not": {}, "x-guidance": {"lenient": True}}
    assert "not" in str(refusal(guided_json=schema))


def test_whitespace_is_the_clients_choice() -> None:
    free = asked(structured_outputs={"json": SCHEMA, "whitespace_pattern": r"\s*"})
    assert decoded(free)["x-guidance"] == {"whitespace_pattern": r"\s*"}
    none = asked(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert decoded(none)["x-guidance"] == {"whitespace_flexible": False}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": 5}, "JSON schema"),
        ({"guided_json": "no json"}, "JSON"),
        ({"guided_regex": "["}, "regex"),
        ({"guided_regex": r"(?=a)b"}, "look-around"),
        ({"guided_regex": 5}, "must be a string"),
        ({"guided_choice": []}, "at least one"),
        ({"guided_choice": [1]}, "string"),
        ({"ebnf": 'start: "a" nothing'}, "nothing"),
        ({"ebnf": "root ::= ((("}, "GBNF"),
        ({"response_format": {"type": "yaml"}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "has json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "has schema"),
        ({"response_format": 5}, "object"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "jsn"),
        ({"structured_outputs": 5}, "object"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structures"),
        ({"structural_tag": TAGS | {"triggers": ["<g="]}}, "trigger"),
        ({"regex": "a", "guided_regex": "b"}, "only one"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], words: str) -> None:
    error = refusal(**fields)
    assert words in str(error)
    assert error.param is not None
    assert error.param.split(".")[0] in fields


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        pytest.param({"regex": "a" * (REGEX_FIELD_CHARACTERS_MAX + 1)}, "characters", id="regex"),
        pytest.param({"guided_choice": ["a"] * (CHOICES_MAX + 1)}, "choices", id="choices"),
        pytest.param({"ebnf": 'root ::= "' + "a" * GBNF_CHARACTERS_MAX + '"'}, "GBNF", id="gbnf"),
    ],
)
def test_each_bound_of_a_field_is_a_400(fields: dict[str, Any], word: str) -> None:
    error = refusal(**fields)
    assert word in str(error)
    assert error.code == "grammar_too_complex"
