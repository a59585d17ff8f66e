"""What an answer must look like: a grammar as the router writes it and the engine compiles it.

Data alone. Routers check it and workers compile it with llguidance, each under the same bounds; schedulers pass it on
unread, as a part of the sampling parameters.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Literal

import msgspec

GrammarKind = Literal[
    "json", "regex", "lark"
]  # a JSON schema, a regular expression, llguidance's dialect of Lark

GRAMMAR_CHARACTERS_MAX = 64 << 10


class Grammar(msgspec.Struct, frozen=True, dict=True):
    """One grammar. Choices, GBNF and structural tags come as Lark: the router has translated them."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=GRAMMAR_CHARACTERS_MAX)]

    @cached_property
    def digest(self) -> str:
        """Names it in caches: equal for equal grammars."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode()).hexdigest()
