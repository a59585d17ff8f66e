"""A prompt that is refused is freed with its answer: no cycle keeps it until the garbage collector comes by."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from router.config import RouterConfig
from router.openai.prompts.prompts import Prompts


class Prompt:
    """What the work holds."""


async def refused(prompts: Prompts) -> weakref.ref[Prompt]:
    prompt = Prompt()

    def work(prompt: Prompt = prompt) -> None:
        raise ValueError(f"{prompt} is too long")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    with pytest.raises(ValueError, match="too long"):
        await prompts.run("tenant", receive, work)
    return weakref.ref(prompt)


def test_a_refused_prompt_is_freed_at_once() -> None:
    prompts = Prompts(None, RouterConfig())  # type: ignore[arg-type]
    gc.disable()
    try:
        assert asyncio.run(refused(prompts))() is None
    finally:
        gc.enable()
        prompts.close()
