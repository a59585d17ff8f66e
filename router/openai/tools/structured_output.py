"""What an answer must look like, in the fields of three APIs: one grammar, checked as the workers will compile it.

    OpenAI    response_format {type: json_object | json_schema | structural_tag | regex …}; others give a json_object
              a schema
    vLLM      structured_outputs {json | json_object | regex | choice | grammar | structural_tag}, and guided_*
    SGLang    json_schema, regex, ebnf

A schema is kept to the letter: a keyword that cannot be kept is refused by its name. A schema of `response_format` is
so only where it says `strict`, as with OpenAI: else such a keyword is passed over and named in the answer's header.
Between the tokens of JSON there is one blank at most, because small models else write blanks until they reach
max_tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import msgspec
from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from router.openai.fields.generation_fields import GenerationFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode
from router.openai.fields.spelling import check_names
from router.text.tokenizer import Tokenizer
from shared.limits import grammars
from shared.limits.grammars import check_bounds, check_nesting, too_large
from shared.primitives.errors import RequestError
from shared.wire.grammar import GRAMMAR_CHARACTERS_MAX, Grammar
from shared.wire.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams

REGEX_FIELD_CHARACTERS_MAX = 8 << 10
CHOICES_MAX = 2000
GBNF_CHARACTERS_MAX = 16 << 10  # its converter is written in Python
ONE_BLANK = " ?"
ANY_OBJECT = {"type": "object"}

_Make = Callable[[Any, str], Grammar | None]


def asked_grammar(fields: GenerationFields, ignored: Ignored) -> Grammar | None:
    """The grammar that a request asks for, within all bounds; None: its answer is free.

    Takes milliseconds, so it is for a thread. Raises `RequestError`, which names the field and what is wrong in it.
    What a lenient schema says and is not kept to goes to `ignored`.
    """
    asked: dict[str, Grammar] = {}
    for name, make in _FIELDS.items():
        value = getattr(fields, name)
        if bytes(value) != b"null" and (grammar := make(_decoded(value, name), name)) is not None:
            asked[name] = grammar
    if len(asked) > 1:
        raise RequestError(
            f"only one of {' and '.join(asked)} may constrain the answer", param=list(asked)[1]
        )
    for name, grammar in asked.items():
        check_grammar(grammar, name, ignored)
        return grammar
    return None


def check_grammar(grammar: Grammar, param: str, ignored: Ignored) -> None:
    """Raise `RequestError` for a grammar that is too large, or that no worker could compile; note what is not kept."""
    check_bounds(grammar, param)
    judgement = grammars.judged(grammar)
    if judgement.problem:
        raise RequestError(
            f"{param} cannot be kept to: {judgement.problem}", param=param, code="invalid_grammar"
        )
    for keyword in (*judgement.unkept, *(["pattern"] if has_pattern_annotations(grammar) else [])):
        ignored.own(f"{param}.{keyword}")


def json_grammar(schema: Any, param: str, *, whitespace: str = ONE_BLANK, lenient: bool = False) -> Grammar:
    """The grammar of JSON that a schema, as JSON or as its text, describes. `lenient` passes keywords over."""
    if isinstance(schema, str):
        schema = _decoded(_text(schema, param).encode(), param)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON schema, which is an object", param=param)
    options: dict[str, Any] = (
        {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    )
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    text = with_calendar(msgspec.json.encode(schema | {"x-guidance": options}))
    if lenient:
        text = with_patterns_as_annotations(text)
    return Grammar("json", text.decode())


def regex_grammar(regex: Any, param: str) -> Grammar:
    r"""The grammar of a regular expression, which the whole answer matches; `\d` are the ten ASCII digits."""
    text = _text(regex, param)
    if len(text) > REGEX_FIELD_CHARACTERS_MAX:
        raise too_large(param, "characters", len(text), REGEX_FIELD_CHARACTERS_MAX)
    return Grammar("regex", regex_to_lark(text, "d"))


def choice_grammar(choices: Any, param: str) -> Grammar:
    """The grammar of one text of a list."""
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise RequestError(f"{param} must be a list of at least one string", param=param)
    if len(choices) > CHOICES_MAX:
        raise too_large(param, "choices", len(choices), CHOICES_MAX)
    escaped = (re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", choice) for choice in choices)
    return Grammar("regex", "(" + "|".join(escaped) + ")")


def lark_grammar(text: Any, param: str) -> Grammar:
    """The grammar of a text in llguidance's dialect of Lark, or in llama.cpp's GBNF, which has `::=`."""
    text = _text(text, param)
    if "::=" not in text:
        return Grammar("lark", text)
    if len(text) > GBNF_CHARACTERS_MAX:
        raise too_large(param, "characters of GBNF", len(text), GBNF_CHARACTERS_MAX)
    try:
        return Grammar("lark", any_to_lark(text))
    except (Exception, RecursionError) as error:  # the converter's own errors have no common type
        raise RequestError(
            f"{param} is not GBNF: {str(error)[:200]}", param=param, code="invalid_grammar"
        ) from None


def tag_grammar(tag: Any, param: str) -> Grammar:
    """The grammar of free text in which a trigger opens a tag, and a tag holds JSON of a schema."""
    if isinstance(tag, str):
        tag = _decoded(_text(tag, param).encode(), param)
    structures, triggers = _field(tag, "structures", param), _field(tag, "triggers", param)
    if not (isinstance(structures, list) and isinstance(triggers, list) and structures and triggers):
        raise RequestError(f"{param} must have lists of structures and of triggers", param=param)
    tags = []
    for structure in structures:
        begin, end = (
            _text(_field(structure, "begin", param), param),
            _text(_field(structure, "end", param), param),
        )
        trigger = next(
            (one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None
        )
        if trigger is None:
            raise RequestError(
                f"{param}: the begin of every structure must start with a trigger", param=param
            )
        schema = json_grammar(_field(structure, "schema", param), param)
        check_bounds(schema, param)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema.text, end=end))
    return Grammar("lark", _text(StructTag.to_grammar(tags, assume_special=False), param))


def _response_format(value: Any, param: str) -> Grammar | None:
    kind = _field(value, "type", param)
    match kind:
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")  # as llama.cpp, Together and Fireworks take one
            return json_grammar(schema or ANY_OBJECT, f"{param}.schema", lenient=bool(schema))
        case "json_schema":
            described = _field(value, "json_schema", param)
            check_names(
                described if isinstance(described, dict) else (), f"{param}.json_schema", "json_schema"
            )
            lenient = isinstance(described, dict) and described.get("strict") is not True
            return json_grammar(_field(described, "schema", f"{param}.json_schema"), param, lenient=lenient)
        case "structural_tag":
            return tag_grammar(value, param)
        case "regex":
            return regex_grammar(value.get("pattern") or value.get("regex"), param)
        case "grammar" | "ebnf" | "lark":
            return lark_grammar(value.get("grammar") or value.get(str(kind)), param)
    raise RequestError(
        f"{param}.type must be text, json_object, json_schema, structural_tag, regex or grammar", param=param
    )


def _structured_outputs(value: Any, param: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object", param=param)
    makes = {
        "json": json_grammar,
        "json_object": _json_object,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": lark_grammar,
        "structural_tag": tag_grammar,
    }
    options = {
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_fallback",
        "disable_additional_properties",
    }
    given = {name: one for name, one in value.items() if one is not None}
    if unknown := given.keys() - makes.keys() - options:
        raise RequestError(f"{param} has no field {min(unknown)[:64]}", param=param)
    if given.get("disable_additional_properties"):
        raise RequestError(f"{param}.disable_additional_properties: say it in the schema", param=param)
    kinds = [name for name in makes if name in given]
    if len(kinds) != 1:
        raise RequestError(f"{param} must have exactly one of {', '.join(makes)}", param=param)
    (kind,) = kinds
    if kind in ("json", "json_object"):
        schema = given[kind] if kind == "json" else ANY_OBJECT
        if kind == "json_object" and given[kind] is False:
            return None
        return json_grammar(schema, param, whitespace=_whitespace(given, param))
    return cast(_Make, makes[kind])(given[kind], param)


def _whitespace(given: dict[str, Any], param: str) -> str:
    if given.get("disable_any_whitespace"):
        return ""
    pattern = given.get("whitespace_pattern", ONE_BLANK)
    if not isinstance(pattern, str) or len(pattern) > 256:
        raise RequestError(
            f"{param}.whitespace_pattern must be a string of at most 256 characters", param=param
        )
    return pattern


def _json_object(value: Any, param: str) -> Grammar | None:
    return json_grammar(ANY_OBJECT, param) if value else None


def _field(value: Any, name: str, param: str) -> Any:
    if not isinstance(value, dict) or value.get(name) is None:
        raise RequestError(f"{param} must be an object that has {name}", param=param)
    return value[name]


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string", param=param)
    if len(value) > GRAMMAR_CHARACTERS_MAX:
        raise too_large(param, "characters", len(value), GRAMMAR_CHARACTERS_MAX)
    return value


def _decoded(value: msgspec.Raw | bytes, param: str) -> Any:
    """JSON within the bounds of nesting and size, which are checked in its bytes."""
    text = bytes(value)
    if len(text) > 6 * GRAMMAR_CHARACTERS_MAX:  # all of it escaped
        raise too_large(param, "characters", len(text), GRAMMAR_CHARACTERS_MAX)
    check_nesting(text.decode(errors="replace"), param)
    try:
        return decode(text, object, param)
    except RequestError as error:
        raise RequestError(f"{param}: {error.message.replace('the body', 'its text')}", param=param) from None


_FIELDS: dict[str, _Make] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": json_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": lark_grammar,
    "structural_tag": tag_grammar,
    "json_schema": json_grammar,
    "regex": regex_grammar,
    "ebnf": lark_grammar,
}


# ---- `format: date`, `time` and `date-time` as patterns that know the calendar ---------------------------------------
# llguidance's own let a month have 31 days and a year be 0000, which validators refuse. What these let pass is valid
# everywhere: RFC 3339 without leap seconds, whose days only a table knows.


_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = r"(0[48]|[2468][048]|[13579][26])"  # 04 … 96
_DAY = (
    f"{_YEAR}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    f"|{_YEAR}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|{_YEAR}-02-(0[1-9]|1[0-9]|2[0-8])"
    f"|([0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS = {"date": f"^({_DAY})$", "time": f"^{_TIME}$", "date-time": f"^({_DAY})T{_TIME}$"}
_BESIDE = {
    "pattern",
    "minLength",
    "maxLength",
}  # constraints of the same text: then its format stays a format


def with_calendar(schema: bytes) -> bytes:
    """A schema as JSON, with patterns in place of these formats."""
    return rewritten(schema, "format", _format_as_pattern)


def _format_as_pattern(node: dict[str, Any]) -> None:
    named = node.get("format")
    if isinstance(named, str) and named in PATTERNS and not _BESIDE & node.keys():
        node["pattern"] = PATTERNS[node.pop("format")]


# ---- bad words as token ids, and what they leave of allowed tokens ---------------------------------------------------
# As in vLLM a word is masked where a text begins and behind a space: each word is two sequences, unless the tokenizer
# makes the same of both. Sequences that spell the word in other tokens are not masked; a regex is for that.


BAD_WORDS_MAX = MAX_BAD_WORDS // 2
BAD_WORD_CHARS_MAX = 256


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The sequences of all words; raises `RequestError`."""
    if len(words) > BAD_WORDS_MAX:
        raise RequestError(
            f"bad_words takes at most {BAD_WORDS_MAX} words, got {len(words)}", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for at, word in enumerate(words):
        text = word.lstrip()
        if not text or len(word) > BAD_WORD_CHARS_MAX:
            raise _refused(at, f"must have 1 to {BAD_WORD_CHARS_MAX} characters, and not spaces alone")
        for spelling in (text, f" {text}"):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise _refused(at, f"has {len(ids)} tokens; a word may have 1 to {MAX_BAD_WORD_TOKENS}")
            found[ids] = None
    return tuple(found)


def check_masks(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raise `RequestError` where nothing might be left of `allowed_token_ids`."""
    if not params.allowed_token_ids:
        return
    left = set(params.allowed_token_ids) - {word[-1] for word in params.bad_words}
    if params.min_new_tokens:
        left -= {*eos_token_ids, *params.stop_token_ids}
    if not left:
        raise RequestError(
            "allowed_token_ids must hold a token that neither bad_words nor min_tokens bars",
            param="allowed_token_ids",
        )


def _refused(at: int, reason: str) -> RequestError:
    return RequestError(f"bad_words[{at}] {reason}", param=f"bad_words[{at}]")


# ---- patterns of a lenient JSON schema that no worker can keep to: they look around, or refer back -------------------
# JavaScript's regular expressions have both, and zod writes them for an e-mail address. Such a pattern becomes an
# annotation under another name, so that the rest of the schema is kept, and the answer's header tells of it.


VALUES = {"const", "enum", "default", "examples"}  # keywords that hold values and no schemas
_ANNOTATION = "x-pattern"
_BEYOND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


def with_patterns_as_annotations(schema: bytes) -> bytes:
    """A schema as JSON, without such patterns."""
    return rewritten(schema, "pattern", _pattern_as_annotation)


def _pattern_as_annotation(node: dict[str, Any]) -> None:
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _BEYOND.search(pattern):
        node[_ANNOTATION] = node.pop("pattern")


def has_pattern_annotations(grammar: Grammar) -> bool:
    """Whether a grammar's schema has lost a pattern."""
    return f'"{_ANNOTATION}"' in grammar.text


def rewritten(schema: bytes, keyword: str, rewrite: Callable[[dict[str, Any]], None]) -> bytes:
    """A schema as JSON, after `rewrite` has changed each of its objects; unread where `keyword` does not occur.

    Nothing here recurses, however deep the schema is.
    """
    if f'"{keyword}"'.encode() not in schema:
        return schema
    whole = msgspec.json.decode(schema)
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            rewrite(node)
            waiting += (value for key, value in node.items() if key not in VALUES)
    return msgspec.json.encode(whole)
