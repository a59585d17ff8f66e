"""The flags of `python -m tests.benchmarks.client`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.process.settings import Count, PositiveInt, Settings, Texts


class BenchConfig(Settings):
    """Measure a server of OpenAI's API: Segue, llama.cpp's, vLLM or any other that knows `ignore_eos`."""

    url: str = Field(default="http://127.0.0.1:8000/v1", description="URL of the server's API, with /v1.")
    model: str = Field(
        default="", description="Name of the model at the server. Empty: the first that it serves."
    )
    scenarios: Texts = Field(
        default=(),
        description="Scenarios to run: stream, streams8, batch32, prompt512, mixed, shared-prefix, interference. "
        "Empty: all.",
    )
    runs: PositiveInt = Field(
        default=1, le=100, description="Runs of each scenario. The table shows the median."
    )
    seed: Count = Field(
        default=0, description="Seed of the prompts. 0: a fresh one, so that no cache knows them."
    )
    size: Literal["full", "small"] = Field(
        default="full", description="small asks for a few tokens each, to see that everything works."
    )
    json_file: str = Field(default="", description="File for all results. Empty: none.")
