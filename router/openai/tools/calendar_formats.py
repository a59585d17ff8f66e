"""`format: date`, `time` and `date-time` of a JSON schema as patterns that know the calendar.

llguidance's own let a month have 31 days and a year be 0000, which validators refuse. What these let pass is valid
everywhere: RFC 3339 without leap seconds, whose days only a table knows.
"""

from __future__ import annotations

from typing import Any

from router.openai.tools.schema_walk import rewritten

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
