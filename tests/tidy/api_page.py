"""Writes `docs/api.md` out of the table of fields: `python -m tests.tidy.api_page` (or `make docs`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import msgspec

from router.openai.fields.states import FieldState, KnownField, Origin
from router.openai.fields.table import KNOWN_FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEAD = """# The API

Written by `make docs` out of `router/openai/fields/of_*.py`; edit those.

Every field of the requests of OpenAI, Anthropic, vLLM and SGLang is here, and many of other servers. An application
never breaks for what it asks beside its question, and is never answered another one in silence:

- what is **served**, is served as it says below, some of it under the names of other servers;
- what would be another answer, and the client can say otherwise, is **refused** with 400 and a sentence that names it;
- what is **passed over** stands in the answer's header `x-segue-ignored`, and in a line `request.ignored` of the
  router's log. So do names that nobody knows, if they are plain words; the log counts them;
- what has **no effect** that a client could see is accepted in silence, as is any field with a value that asks for
  nothing: `null`, and those given below.

A slip in a name of sampling (`tempreature`, `topP`, `max_token`), of tools, of the form of an answer or of its stream
is refused with the name that was meant; so are slips within `tools`, `json_schema`, `stream_options`, `text`,
`thinking`, `output_config` and `output_format`.

The header may name a part of a field. `tools[0].web_search` is a tool that is left out. `response_format.not` is a
keyword of its schema, `not`, that answers are not kept to, wherever in the schema it stands; /v1/responses has it as
`text.format.not`, /v1/messages as `output_config.format.not`.
"""
HEADERS = {
    "Authorization: Bearer KEY": ("all", "where API keys are asked for"),
    "x-api-key: KEY": ("all", "the same, as Anthropic's clients send it"),
    "anthropic-version, anthropic-beta": (
        "all",
        "any value: errors have Anthropic's form, and answers a `request-id` beside the `x-request-id`",
    ),
    "X-Segue-Resumable: true": (
        "streams of chat and completions",
        "each event with text has an `id`; not with logprobs, `return_token_ids` or `echo`",
    ),
    "X-Segue-Local-Prefill: never": (
        "chat, completions, responses, messages",
        "the prompt is computed by a prefill worker while one is up, whatever `local_prefill` says; `helm test` sends "
        "it",
    ),
    "Last-Event-ID: ID": (
        "the same body, at any router",
        "the stream goes on behind that event; the answer before it is computed again. 409 `stream_not_resumable`: "
        "what computes now may give another text. 400: the id is of another deployment, or of `segue up` before it was "
        "started again",
    ),
    "Idempotency-Key: KEY": (
        "chat, completions, responses, messages",
        "without `seed`, the same request gives the same answer, at any router; it is computed and paid for each time. "
        "A router remembers keys for ten minutes: the same one with another body is 422 `idempotency_key_reused`",
    ),
}
ANSWER_HEADERS = {
    "x-segue-request-id": "the request's id in logs and on `/debug/requests/{id}`",
    "x-request-id": "the same, or the client's own `x-request-id` if that is a plain word of up to 128 characters",
    "x-segue-ignored": "names what of the body was passed over, up to 32 of this program's names and 8 of the client's",
}
ORIGINS = get_args(Origin)  # in the order in which the page has them
TITLES: dict[FieldState, str] = {
    "served": "Served",
    "alias": "Served as another field",
    "refused": "Refused by name",
    "passed over": "Passed over, and named in the answer",
    "no effect": "Accepted, without effect",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD, "\n## Headers\n", "| header | of | what it does |", "|---|---|---|"]
    parts += [f"| `{header}` | {of} | {does} |" for header, (of, does) in HEADERS.items()]
    parts += ["\n| header of answers | what it says |", "|---|---|"]
    parts += [f"| `{header}` | {says} |" for header, says in ANSWER_HEADERS.items()]
    parts.append(
        "\nA client keeps its connection open in both directions until the answer has come: one that closes its "
        "sending side counts as gone, and its request is cancelled."
    )
    parts.append("\nStreams are resumed [by computing them again](decisions/0026-resumed-streams.md).")
    for state, title in TITLES.items():
        parts.append(f"\n## {title}\n")
        chosen = sorted(
            (field for field in KNOWN_FIELDS if field.state == state),
            key=lambda field: ORIGINS.index(field.origin),
        )
        for origin, fields in groupby(chosen, key=lambda field: field.origin):
            parts.append(f"\n### {'Other servers' if origin == 'others' else origin}\n")
            parts += ["", *_rows(state, list(fields)), ""]
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _rows(state: FieldState, fields: list[KnownField]) -> Iterator[str]:
    neutral = state in ("alias", "refused", "passed over")
    yield "| field | of | " + ("asks for nothing | remark |" if neutral else "remark |")
    yield "|---|---|---|" + ("---|" if neutral else "")
    for (endpoints, values, remark), alike in groupby(fields, key=_row):
        names = ", ".join(f"`{field.name}`" for field in alike)
        yield f"| {names} | {endpoints} |" + (f" {values} |" if neutral else "") + f" {remark} |"


def _row(field: KnownField) -> tuple[str, str, str]:
    """What stands beside the name: endpoints, neutral values and remark."""
    return ", ".join(field.endpoints), ", ".join(map(_code, field.neutral)), field.remark


def _code(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
