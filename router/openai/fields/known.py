"""Every field of the requests of OpenAI, Anthropic, vLLM, SGLang, and of a few other servers: what becomes of it here.

Data alone. `table` reads bodies by it, and `python -m tests.tidy.api_page` writes docs/api.md out of it. A field that
would change the output is served, refused or named in the answer's header, never ignored in silence; see `states`.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.openai.fields.of_anthropic import ANTHROPIC_FIELDS
from router.openai.fields.of_engines import SGLANG_FIELDS, VLLM_FIELDS
from router.openai.fields.of_openai import OPENAI_FIELDS
from router.openai.fields.of_others import OTHER_FIELDS
from router.openai.fields.of_responses import RESPONSES_FIELDS
from router.openai.fields.states import Endpoint, KnownField

KNOWN_FIELDS: tuple[KnownField, ...] = (
    *OPENAI_FIELDS,
    *RESPONSES_FIELDS,
    *ANTHROPIC_FIELDS,
    *VLLM_FIELDS,
    *SGLANG_FIELDS,
    *OTHER_FIELDS,
)


def fields_of(endpoint: Endpoint, known: Iterable[KnownField] = KNOWN_FIELDS) -> dict[str, KnownField]:
    """What the table says of each field of an endpoint, by name."""
    return {field.name: field for field in known if endpoint in field.endpoints}
