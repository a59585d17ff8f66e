"""What may become of a field of a request; see `table`, which says it of each.

served       the struct of its endpoint has it
alias        it means what a served field means, and is served as that
refused      400 with a sentence: a value asks for another answer, and the client can do something about it
passed over  it asks for something that this server does not do: the answer's `x-segue-ignored` names it
no effect    accepted: it asks for nothing that a client could see in the output

A neutral value asks for nothing: a field that holds one is accepted in silence, whatever its state. Null always is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["chat", "completions", "responses", "messages"]
Origin = Literal["OpenAI", "Anthropic", "vLLM", "SGLang", "others"]
FieldState = Literal["served", "alias", "refused", "passed over", "no effect"]

CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
RESPONSES: tuple[Endpoint, ...] = ("responses",)
MESSAGES: tuple[Endpoint, ...] = ("messages",)
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
ALL: tuple[Endpoint, ...] = (*BOTH, *RESPONSES)

# by the field's name; a tuple has neutral values, too
Remarks = Mapping[str, str | tuple[str, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class KnownField:
    """One field of one or more endpoints."""

    name: str
    origin: Origin
    endpoints: tuple[Endpoint, ...]
    state: FieldState
    remark: str = ""  # what a client does instead, why it has no effect, or how it is served
    neutral: tuple[Any, ...] = ()
    alias_of: str = ""


def served(origin: Origin, endpoints: tuple[Endpoint, ...], fields: dict[str, str]) -> Iterator[KnownField]:
    return (KnownField(name, origin, endpoints, "served", remark) for name, remark in fields.items())


def no_effect(
    origin: Origin, endpoints: tuple[Endpoint, ...], fields: dict[str, str]
) -> Iterator[KnownField]:
    return (KnownField(name, origin, endpoints, "no effect", remark) for name, remark in fields.items())


def refused(origin: Origin, endpoints: tuple[Endpoint, ...], fields: Remarks) -> Iterator[KnownField]:
    return _with_neutral(origin, endpoints, "refused", fields)


def passed_over(origin: Origin, endpoints: tuple[Endpoint, ...], fields: Remarks) -> Iterator[KnownField]:
    return _with_neutral(origin, endpoints, "passed over", fields)


def names_passed_over(
    remark: str, names: Iterable[str], neutral: tuple[Any, ...] = ()
) -> Iterator[KnownField]:
    """Fields of other servers that have one remark and the same neutral values."""
    return passed_over("others", ALL, dict.fromkeys(names, (remark, neutral)))


def aliases(
    endpoints: tuple[Endpoint, ...], fields: Mapping[str, str | tuple[str, tuple[Any, ...]]]
) -> Iterator[KnownField]:
    """Names of other servers for a served field: `fields` has it for each; a tuple has neutral values, too."""
    for name, said in fields.items():
        own, neutral = said if isinstance(said, tuple) else (said, ())
        yield KnownField(name, "others", endpoints, "alias", f"served as `{own}`", neutral, own)


def _with_neutral(
    origin: Origin, endpoints: tuple[Endpoint, ...], state: FieldState, fields: Remarks
) -> Iterator[KnownField]:
    for name, said in fields.items():
        remark, neutral = said if isinstance(said, tuple) else (said, ())
        yield KnownField(name, origin, endpoints, state, remark, neutral)
