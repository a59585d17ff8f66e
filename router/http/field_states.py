"""What may become of a field of a request; see `known_fields`, which says it of each.

served      the struct of its endpoint has it
refused     400 with a sentence, unless it holds a neutral value: one that asks for nothing
no effect   accepted: it asks for nothing that a client could see in the output
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["chat", "completions", "responses"]
Origin = Literal["OpenAI", "vLLM", "SGLang", "others"]
FieldState = Literal["served", "refused", "no effect"]

CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
RESPONSES: tuple[Endpoint, ...] = ("responses",)
BOTH: tuple[Endpoint, ...] = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class KnownField:
    """One field of one or more endpoints."""

    name: str
    origin: Origin
    endpoints: tuple[Endpoint, ...]
    state: FieldState
    remark: str = ""  # what a client does instead, why it has no effect, or how it is served
    neutral: tuple[Any, ...] = ()  # accepted although the field is refused; null always is


def served(origin: Origin, endpoints: tuple[Endpoint, ...], fields: dict[str, str]) -> Iterator[KnownField]:
    return (KnownField(name, origin, endpoints, "served", remark) for name, remark in fields.items())


def no_effect(
    origin: Origin, endpoints: tuple[Endpoint, ...], fields: dict[str, str]
) -> Iterator[KnownField]:
    return (KnownField(name, origin, endpoints, "no effect", remark) for name, remark in fields.items())


def refused(
    origin: Origin, endpoints: tuple[Endpoint, ...], fields: dict[str, str | tuple[str, tuple[Any, ...]]]
) -> Iterator[KnownField]:
    for name, said in fields.items():
        remark, neutral = said if isinstance(said, tuple) else (said, ())
        yield KnownField(name, origin, endpoints, "refused", remark, neutral)
