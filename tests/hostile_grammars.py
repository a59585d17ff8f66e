"""Grammars that have ended, filled or stopped other servers, each as the fields of a request."""

from __future__ import annotations

import json
from typing import Any

PROPERTY = {"type": "string"}


def _nested(levels: int, value: Any, wrap: Any) -> Any:
    for _ in range(levels):
        value = wrap(value)
    return value


def _chain(count: int, link: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next one, twice."""
    names = [{"$ref": f"#/$defs/d{number + 1}"} for number in range(count)]
    defs = {f"d{number}": link(name) for number, name in enumerate(names)} | {f"d{count}": PROPERTY}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def _rules(count: int, rule: str) -> str:
    """Lark in which each rule is made of the next one."""
    return "start: a0\n" + "\n".join(rule.format(at, at + 1) for at in range(count)) + f'\na{count}: "x"'


_OBJECT = {"type": "object"}
SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "itself in allOf": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "oneOf of depth 30": _nested(
        30, PROPERTY, lambda inner: {"oneOf": [inner, {"type": "object", "properties": {"a": PROPERTY}}]}
    ),
    "oneOf by references": _chain(30, lambda name: {"oneOf": [name, {"type": "array", "items": name}]}),
    "anyOf by references": _chain(25, lambda name: {"anyOf": [name, name]}),
    "allOf by references": _chain(25, lambda name: {"allOf": [name, name]}),
    "500 optional properties": _OBJECT | {"properties": {f"p{at}": PROPERTY for at in range(500)}},
    "5,000 optional properties": _OBJECT | {"properties": {f"p{at}": PROPERTY for at in range(5000)}},
    "2,000 properties by allOf": {
        "allOf": [
            _OBJECT | {"properties": {f"p{part}_{at}": PROPERTY for at in range(490)}} for part in range(4)
        ]
    },
    "product of unions": {
        "allOf": [
            {"anyOf": [_OBJECT | {"properties": {f"k{part}{at}": PROPERTY}} for at in range(4)]}
            for part in range(10)
        ]
    },
    "60,000 enums": {"enum": list(range(60_000))},
    "2,000 enums": {"enum": [f"value {at}" for at in range(2000)]},
    "expressions that all hold": {
        "allOf": [{"type": "string", "pattern": f".*{one}.{{20}}{one}.*"} for one in "abcdef"]
    },
    "multiples": {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (997, 991, 983)]},
    "a multiple": {"type": "integer", "multipleOf": 9973},
    "long string": {"type": "string", "minLength": 30_000, "maxLength": 60_000},
    "long list": {"type": "array", "minItems": 40_000, "items": _OBJECT},
    "patterns of properties": _OBJECT
    | {"patternProperties": {f"^a.*{at}.{{9}}$": PROPERTY for at in range(100)}},
    "bounds of many digits": {"type": "number", "minimum": -1.2345678901e300, "maximum": 1.2345678901e300},
    "options of the library": {"x-guidance": {"whitespace_pattern": "(a{0,999}){0,999}"}, "type": "object"},
    "a pattern that explodes": {"type": "string", "pattern": "^(.*[ab].{30}){5}$"},
    "many patterns": _OBJECT
    | {"properties": {f"p{at}": {"type": "string", "pattern": f".*a.{{{at}}}"} for at in range(60)}},
}
REGEXES = {
    "powers": "(a{0,999}){0,999}",
    "powers of classes": "(([a-z]{0,300}x){0,300}y){0,50}",
    "far apart": "(.*a.{200}|.*b.{180})c",
    "far apart, many times": "(.*[ab].{30}){5}",
    "parentheses": "(" * 4000 + "a" + ")" * 4000,
    "Unicode": r"(\p{L}|\p{N}){1,900}",
    "alternatives": "|".join("a" * at for at in range(120)),
    "nothing": r"[^\s\S]",
    "any text": r"[\s\S]{0,4000}z",
    "no case": "(?i)((a|b|c|d)*x){1,50}",
}
GRAMMARS = {
    "doubling terminals": "start: A0\n"
    + "\n".join(f"A{at}: A{at + 1} A{at + 1}" for at in range(40))
    + '\nA40: "x"',
    "doubling rules": _rules(40, "a{0}: a{1} a{1}"),
    "doubling rules that may be empty": _rules(40, "a{0}: a{1} a{1} |"),
    "a chain of 900 rules": _rules(900, "a{0}: a{1}"),
    "a chain of 9,000 rules": _rules(9000, "a{0}: a{1}"),
    "ambiguous": 'start: s\ns: s s | "a" |',
    "ambiguous expressions": "start: s\ns: s s s | s s | /a*/ | /[ab]*/",
    "parentheses in Lark": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "powers in Lark": 'start: (("a" | "b"){1,1000}){1,1000}',
    "deep JSON in Lark": "start: %json " + '{"items":' * 900 + "{}" + "}" * 900,
    "intersection": "start: A\nA: /(.*a.{50})/ & /(.*b.{50})/ & ~/(.*c.{50})/",
    "parentheses in GBNF": "root ::= " + "(" * 9000 + '"a"',
    "words in GBNF": "root ::= " + '"a" ' * 3000,
    "rules in GBNF": "root ::= " + " | ".join(f"r{at}" for at in range(400)) + '\nr0 ::= "a"',
}
HOSTILE: dict[str, dict[str, Any]] = {
    **{f"schema: {name}": {"guided_json": schema} for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": {"regex": regex} for name, regex in REGEXES.items()},
    **{f"grammar: {name}": {"ebnf": text} for name, text in GRAMMARS.items()},
    "choices: 60,000": {"guided_choice": [str(at) for at in range(60_000)]},
    "schema: nesting 1,000": {"guided_json": '{"items":' * 1000 + "{}" + "}" * 1000},
    "schema: nesting 60,000": {"guided_json": "[" * 60_000},
    "schema: 60 KiB of properties": {"guided_json": json.dumps({f"p{at}": {} for at in range(4500)})},
}
