"""What `python -m tests.benchmarks.client` can be told."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.process.settings import Count, PositiveInt


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Measure a server of OpenAI's API: Segue, llama.cpp's, vLLM or any other that knows `ignore_eos`."""

    url: Annotated[str, Meta(description="the server's API, up to and with /v1")] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, Meta(description="as the server calls it; empty: the first that it serves")] = ""
    scenarios: Annotated[
        tuple[str, ...],
        Meta(
            description="stream, streams8, batch32, prompt512, mixed, shared-prefix, interference; empty: all"
        ),
    ] = ()
    runs: Annotated[PositiveInt, Meta(le=100, description="of each scenario; the table shows the median")] = 1
    seed: Annotated[
        Count, Meta(description="of the prompts; 0: a fresh one, so that no cache knows them")
    ] = 0
    size: Annotated[
        Literal["full", "small"], Meta(description="small: a few tokens each, to see that it works")
    ] = "full"
    json: Annotated[str, Meta(description="file for all results; empty: none")] = ""
