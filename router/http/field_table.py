"""Reads a body by the table of `known_fields`: nothing that asks for something is passed over in silence.

A refused field is an error unless it holds a neutral value. A field that no server knows is passed over, as vLLM and
SGLang do, because clients add words of their own; but a name that differs from a known one by a slip of the finger is
an error that tells the known one.

Values stay bytes until they are asked for, and all but the prompt are bounded together before.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec

from router.http.field_states import Endpoint, KnownField
from router.http.known_fields import KNOWN_FIELDS, fields_of
from router.http.request_body import decode
from shared.errors import RequestError

SMALL_FIELDS_BYTES_MAX = 512 << 10  # 16 stop strings of 1,024 characters that are all escaped take 200 KiB
NEUTRAL_BYTES_MAX = 64
NAMES_MAX = 4096  # of a body whose unknown names are looked at; far more than any client sends
LARGE_FIELDS = ("prompt", "messages", "input")  # they have bounds of their own
UNKNOWN = "unknown_parameter"  # OpenAI's word
OBJECTS = {  # the names within fields, of which a slip would change the output
    "stream_options": ("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "json_schema": ("name", "description", "schema", "strict"),
    "tool": ("type", "function", "name", "description", "parameters", "strict"),
    "function": ("name", "description", "parameters", "strict"),
    "text": ("format", "verbosity"),
    "text.format": ("type", "name", "description", "schema", "strict"),
}
SLIP = 0.8  # how alike two names are, from 0 to 1, if one is taken for the other

FieldsT = TypeVar("FieldsT", bound=msgspec.Struct)
_ABSENT = msgspec.Raw(b"null")
_ELSEWHERE = {field.name: field for field in KNOWN_FIELDS}


def read_by_table(body: bytes | bytearray, endpoint: Endpoint, kind: type[FieldsT]) -> FieldsT:
    """The served fields of a body; raises `RequestError` for the first that is wrong, refused or misspelt."""
    fields = msgspec.structs.asdict(_envelope(endpoint, body))
    given = {name: bytes(value) for name, value in fields.items() if value is not _ABSENT}
    if sum(len(value) for name, value in given.items() if name not in LARGE_FIELDS) > SMALL_FIELDS_BYTES_MAX:
        raise RequestError(f"the fields beside the prompt must not exceed {SMALL_FIELDS_BYTES_MAX} bytes")
    known = fields_of_endpoint(endpoint)
    for name, value in given.items():
        field = known[name]
        if field.state == "refused" and not is_neutral(value, field.neutral):
            raise RequestError(f"{name} is not supported: {field.remark}", param=name)
    for name in ("stream_options", "text"):
        _check_object(given.get(name, b""), name)
    return decode(body, kind)


def _check_object(value: bytes, path: str) -> None:
    """Look for slips in the names of an object, and of its `format`."""
    if value.startswith(b"{"):
        inner = decode(value, dict[str, msgspec.Raw], path)
        check_names(inner, path, path)
        if path == "text" and "format" in inner:
            _check_object(bytes(inner["format"]), "text.format")


def is_neutral(value: bytes, neutral: tuple[Any, ...]) -> bool:
    """Null, or equal to one of `neutral` and of its type: False is not 0."""
    if len(value) > NEUTRAL_BYTES_MAX:
        return False
    decoded = decode(value, object)
    return decoded is None or any(type(decoded) is type(one) and decoded == one for one in neutral)


@cache
def fields_of_endpoint(endpoint: Endpoint) -> dict[str, KnownField]:
    """See `known_fields.fields_of`; made once."""
    return fields_of(endpoint)


@cache
def _envelope_of(endpoint: Endpoint, strict: bool) -> Any:
    fields = [(name, msgspec.Raw, _ABSENT) for name in fields_of_endpoint(endpoint)]
    return msgspec.defstruct("_Envelope", fields, forbid_unknown_fields=strict)


def _envelope(endpoint: Endpoint, body: bytes | bytearray) -> Any:
    """The bytes of every known field. Unknown ones cost a second look at the body, which few bodies need."""
    try:
        return msgspec.json.decode(body, type=_envelope_of(endpoint, True))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        envelope = decode(body, _envelope_of(endpoint, False))  # raises what is wrong with it as JSON
    if body.count(b":") <= NAMES_MAX:  # else the names alone could be a burden
        _check_spelling(endpoint, decode(body, dict[str, msgspec.Raw]))
    return envelope


def _check_spelling(endpoint: Endpoint, given: dict[str, msgspec.Raw]) -> None:
    known = fields_of_endpoint(endpoint)
    for name, value in given.items():
        if name in known:
            continue
        if (other := _ELSEWHERE.get(name)) and other.state != "no effect":
            if not is_neutral(bytes(value), other.neutral):
                raise RequestError(f"{name} is not a field of this path", param=name, code=UNKNOWN)
            continue
        check_name(name, known)


def check_name(name: str, known: Collection[str], within: str = "") -> None:
    """Raise `RequestError` for a name that is no field of `within`, but nearly one, or one in camelCase."""
    if name in known:
        return
    plain = {_letters(one): one for one in known}.get(_letters(name))
    near = [plain] if plain else difflib.get_close_matches(name[:64], known, n=1, cutoff=SLIP)
    if near:
        param = f"{within}.{name[:64]}" if within else name[:64]
        raise RequestError(f"{param} is not a field; did you mean {near[0]}?", param=param, code=UNKNOWN)


def _letters(name: str) -> str:
    return "".join(letter for letter in name[:64].lower() if letter.isalnum())


def check_names(given: Iterable[str], within: str, kind: str) -> None:
    """The same of all names of an object of this kind."""
    for name in given:
        check_name(name, OBJECTS[kind], within)
