"""What the HTTP side must be told: its bounds, with units and the reason for each default.

The process's configuration holds the same names; this is what remains of it inside `router.api`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Bounds of one router's HTTP side."""

    model_names: tuple[str, ...]  # what clients may call the model; the first one is its name in answers
    max_body_bytes: int = 4 << 20  # one request's body; a full context of token ids is far below
    all_bodies_bytes_max: int = 256 << 20  # bodies being read at one time, above it 429
    body_seconds_max: float = (
        30.0  # until a body has arrived: a client must not hold memory by sending slowly
    )
    prompts_max: int = 64  # prompts in one request: each is a request to the fleet
    tokenizing_max: int = 256  # requests waiting for the tokenizer's threads, above it 429
    tokenizer_threads: int = 2
    stream_backlog_bytes: int = 1 << 20  # text that a client has not read; above it the stream is cut
    sse_silence_seconds: float = 10.0  # then a comment line: proxies cut connections that look dead
    retry_after_seconds: float = 1.0  # told with 429 and 503 when the core did not say
