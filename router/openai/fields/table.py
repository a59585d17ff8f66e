"""Reads a body by a table of every field: what asks for something and is not served is refused, or named in the answer.

The table is data alone, in `of_apis`, `of_engines` and `of_others`: a field that would change the output is served,
refused or named in the answer's header, never ignored in silence; see `states`. `python -m tests.tidy.api_page` writes
docs/api.md out of it. Values stay bytes until they are asked for, and all but the prompt are bounded together before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from router.openai.fields.ignored import Ignored
from router.openai.fields.of_apis import ANTHROPIC_FIELDS, OPENAI_FIELDS, RESPONSES_FIELDS
from router.openai.fields.of_engines import SGLANG_FIELDS, VLLM_FIELDS
from router.openai.fields.of_others import OTHER_FIELDS
from router.openai.fields.request_body import decode
from router.openai.fields.spelling import OBJECTS, UNKNOWN, check_guarded, check_names
from router.openai.fields.states import Endpoint, KnownField
from shared.primitives.errors import RequestError

KNOWN_FIELDS: tuple[KnownField, ...] = (
    *OPENAI_FIELDS,
    *RESPONSES_FIELDS,
    *ANTHROPIC_FIELDS,
    *VLLM_FIELDS,
    *SGLANG_FIELDS,
    *OTHER_FIELDS,
)

SMALL_FIELDS_BYTES_MAX = 512 << 10  # 16 stop strings of 1,024 characters that are all escaped take 200 KiB
NEUTRAL_BYTES_MAX = 64
NAMES_MAX = 16_384  # of a body whose unknown names are looked at: they take 4 MB while they are
LARGE_FIELDS = ("prompt", "messages", "input", "system")  # they have bounds of their own
# without these a client would be answered another question
OTHER_ENDPOINTS = ("messages", "tools", "functions")

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)
_ABSENT = msgspec.Raw(b"null")
# Of fields that differ by path, what asks for something takes precedence over what has no effect.
_ELSEWHERE = {field.name: field for field in sorted(KNOWN_FIELDS, key=lambda one: one.state != "no effect")}
_SERVED_ELSEWHERE = frozenset(field.name for field in KNOWN_FIELDS if field.state == "served")  # are no slips
_CHECKED_OBJECTS = ("stream_options", "text", "thinking", "output_config", "output_format")


@cache
def fields_of(endpoint: Endpoint) -> dict[str, KnownField]:
    """What the table says of each field of an endpoint, by name."""
    return {field.name: field for field in KNOWN_FIELDS if endpoint in field.endpoints}


def read_by_table(
    body: bytes | bytearray, endpoint: Endpoint, kind: type[FieldsT], ignored: Ignored
) -> FieldsT:
    """The served fields of a body. Names in `ignored` what is passed over.

    Raises `RequestError` for the first field that is wrong, refused, or a slip of a served one.
    """
    given, unknown = _given(endpoint, body)
    if sum(len(value) for name, value in given.items() if name not in LARGE_FIELDS) > SMALL_FIELDS_BYTES_MAX:
        raise RequestError(f"the fields beside the prompt must not exceed {SMALL_FIELDS_BYTES_MAX} bytes")
    known, aliases = fields_of(endpoint), []
    for name, value in given.items():
        field = known[name]
        if field.state in ("served", "no effect") or is_neutral(value, field.neutral):
            continue
        if field.state == "refused":
            raise RequestError(f"{name} is not supported: {field.remark}", param=name)
        if field.state == "alias":
            aliases.append((field, value))
        else:
            ignored.own(name)
    if unknown:
        _pass_over(endpoint, unknown, ignored)
    for name in _CHECKED_OBJECTS:
        if name in given:
            _check_object(given[name], name)
    fields = decode(body, kind)
    for field, value in aliases:
        _take_alias(fields, field, value, given, ignored)
    return fields


def _check_object(value: bytes, path: str) -> None:
    """Look for slips in the names of an object, and of its `format`."""
    if value.startswith(b"{"):
        inner = decode(value, dict[str, msgspec.Raw], path)
        check_names(inner, path, path)
        if "format" in inner and f"{path}.format" in OBJECTS:
            _check_object(bytes(inner["format"]), f"{path}.format")


def _take_alias(
    fields: msgspec.Struct, field: KnownField, value: bytes, given: dict[str, bytes], ignored: Ignored
) -> None:
    """Serve a field under its own name; one that is there under that name already takes precedence."""
    name, own = field.name, field.alias_of
    said = given.get(own)
    if said is None or is_neutral(said, ()):
        setattr(fields, own, decode(value, _types_of(type(fields))[own], name))
        given[own] = value
    elif said != value:
        ignored.own(name)


@cache
def _types_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind)


def is_neutral(value: bytes, neutral: tuple[Any, ...]) -> bool:
    """Null, or equal to one of `neutral`: 1.0 is 1, but false is not 0."""
    if len(value) > NEUTRAL_BYTES_MAX:
        return False
    decoded = decode(value, object)
    return decoded is None or any(_is_same(decoded, one) for one in neutral)


def _is_same(decoded: Any, neutral: Any) -> bool:
    return isinstance(decoded, bool) == isinstance(neutral, bool) and bool(decoded == neutral)


def _given(endpoint: Endpoint, body: bytes | bytearray) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The bytes of every known field of a body, and of those that the endpoint does not know.

    Of a body with so many names that they could be a burden, no unknown ones.
    """
    if body.count(b":") > NAMES_MAX:
        fields = msgspec.structs.asdict(decode(body, _envelope_of(endpoint)))
        return {name: bytes(value) for name, value in fields.items() if value is not _ABSENT}, {}
    known = fields_of(endpoint)
    given: dict[str, bytes] = {}
    unknown: dict[str, bytes] = {}
    for name, value in decode(body, dict[str, msgspec.Raw]).items():
        (given if name in known else unknown)[name] = bytes(value)
    return given, unknown


@cache
def _envelope_of(endpoint: Endpoint) -> Any:
    fields = [(name, msgspec.Raw, _ABSENT) for name in fields_of(endpoint)]
    return msgspec.defstruct("_Envelope", fields)


def _pass_over(endpoint: Endpoint, given: dict[str, bytes], ignored: Ignored) -> None:
    """Note the fields that this endpoint does not have; raises `RequestError` for one that was surely meant."""
    served = [name for name, field in fields_of(endpoint).items() if field.state == "served"]
    check_guarded((name for name in given if name not in _SERVED_ELSEWHERE), served)
    for name, value in given.items():
        other = _ELSEWHERE.get(name)
        if other is None:
            ignored.client(name)
        elif other.state != "no effect" and not is_neutral(value, other.neutral):
            if name in OTHER_ENDPOINTS:
                raise RequestError(f"{name} is not a field of this path", param=name, code=UNKNOWN)
            ignored.own(name)
