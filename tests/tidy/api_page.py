"""Writes `docs/api.md` out of the table of fields: `python -m tests.tidy.api_page` (or `make docs`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from router.http.field_states import FieldState, KnownField
from router.http.known_fields import KNOWN_FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEAD = """# The API

Written by `make docs` out of `router/http/known_fields.py`; edit that.

Every field of the requests of OpenAI, vLLM and SGLang is here, and some of other servers. Nothing that would change the
output is ignored: a field is served, or refused with 400 and a sentence that names it, or it has no effect that a
client could see. A refused field may still hold a value that asks for nothing, such as `null` and those given below. A
name that nobody knows is passed over, unless it is nearly one of these; so are names within `tools`, `json_schema`,
`stream_options` and `text`.
"""
HEADERS = {
    "Authorization: Bearer KEY": ("all", "where API keys are asked for"),
    "X-Segue-Resumable: true": (
        "streams of chat and completions",
        "each event with text has an `id`; not with logprobs, `return_token_ids` or `echo`",
    ),
    "Last-Event-ID: ID": (
        "the same body, at any router",
        "the stream goes on behind that event; the answer before it is computed again. 409 `stream_not_resumable`: "
        "what computes now may give another text. 400: the id is of another deployment, or of `segue up` before it was "
        "started again",
    ),
    "Idempotency-Key: KEY": (
        "chat, completions, responses",
        "without `seed`, the same request gives the same answer, at any router; it is computed and paid for each time. "
        "A router remembers keys for ten minutes: the same one with another body is 422 `idempotency_key_reused`",
    ),
}
TITLES: dict[FieldState, str] = {
    "served": "Served",
    "refused": "Refused by name",
    "no effect": "Accepted, without effect",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD, "\n## Headers\n", "| header | of | what it does |", "|---|---|---|"]
    parts += [f"| `{header}` | {of} | {does} |" for header, (of, does) in HEADERS.items()]
    parts.append("\nStreams are resumed [by computing them again](decisions/0026-resumed-streams.md).")
    for state, title in TITLES.items():
        parts.append(f"\n## {title}\n")
        chosen = [field for field in KNOWN_FIELDS if field.state == state]
        for origin, fields in groupby(chosen, key=lambda field: field.origin):
            parts.append(f"\n### {'Other servers' if origin == 'others' else origin}\n")
            parts += ["", *_rows(state, list(fields)), ""]
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _rows(state: FieldState, fields: list[KnownField]) -> Iterator[str]:
    neutral = state == "refused"
    yield "| field | of | " + ("accepted | why |" if neutral else "remark |")
    yield "|---|---|---|" + ("---|" if neutral else "")
    for field in fields:
        accepted = f" {', '.join(map(_code, field.neutral))} |" if neutral else ""
        yield f"| `{field.name}` | {', '.join(field.endpoints)} |{accepted} {field.remark} |"


def _code(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
