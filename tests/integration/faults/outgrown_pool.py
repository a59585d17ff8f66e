"""Chats that outgrow the KV memory of `segue up`: `python -m tests.integration.faults.outgrown_pool`.

Twelve chats without `max_tokens` that end with the context alone, and beside them six prompts of 4,400 tokens, for two
minutes, with the settings that `segue up` has by itself (12,288 tokens of KV). Then each stream's tokens are compared
with those that it gets undisturbed. A prompt may be refused before its first token, and no stream may end in an error
behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from zlib import crc32

import openai

from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import client_of

CHATS = 12
PROMPTS, PROMPT_TOKENS, PROMPT_MAX_TOKENS = 6, 4_400, 150
PROMPTS_FROM, PROMPTS_EVERY = 20.0, 4.0  # seconds
PAUSE_SECONDS_MAX = 30.0
UNDISTURBED = 2  # streams at a time: each grows to a third of the pool
COUNTED = ("segue_retractions_total", "segue_turns_total", "segue_backups_total", "segue_recomputed_total")


@dataclass
class WatchedStream:
    """A chat, or a prompt of so many tokens, and what came of it when."""

    name: str
    prompt_tokens: int = 0  # 0: a chat
    text: str = ""
    longest_pause: float = 0.0  # seconds behind the first token, until its end or that of the trial
    error: str = ""
    _last: float = 0.0

    async def read(self, client: openai.AsyncOpenAI, *, chars_max: int | None = None) -> None:
        """Read the stream until it ends, has so many characters, or is cancelled."""
        ended = False
        try:
            async with aclosing(self._pieces(client)) as pieces:  # one that is left gives its room back
                async for text in pieces:
                    self._note()
                    self.text += text
                    if chars_max is not None and len(self.text) >= chars_max:
                        break
            ended = True
        except openai.APIError as error:
            self.error, ended = str(error), True
        finally:
            if not ended:
                self._note()

    async def _pieces(self, client: openai.AsyncOpenAI) -> AsyncGenerator[str, None]:
        endless = {"ignore_eos": True}
        if not self.prompt_tokens:
            async with await client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": f"Tell me all that you know of {self.name}."}],
                temperature=0,
                stream=True,
                extra_body=endless,
            ) as chat:
                async for chunk in chat:
                    for choice in chunk.choices:
                        if choice.delta.content:
                            yield choice.delta.content
            return
        async with await client.completions.create(
            model="smollm2",
            prompt=unlike(self.name, self.prompt_tokens),
            max_tokens=PROMPT_MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body=endless,
        ) as answer:
            async for each in answer:
                for text in (choice.text for choice in each.choices if choice.text):
                    yield text

    def _note(self) -> None:
        """Something has come; before the first token nothing is a pause."""
        now = monotonic()
        if self.text:
            self.longest_pause = max(self.longest_pause, now - self._last)
        self._last = now


async def disturbed(
    running: LocalDeployment, chats: list[WatchedStream], prompts: list[WatchedStream], seconds: float
) -> None:
    """All chats at once, and the prompts one after the other, for so many seconds."""
    end = monotonic() + seconds
    async with client_of(running.url) as client:
        tasks = [asyncio.create_task(chat.read(client)) for chat in chats]
        wait = PROMPTS_FROM
        for prompt in prompts:
            await asyncio.wait(tasks, timeout=wait)
            tasks.append(asyncio.create_task(prompt.read(client)))
            wait = PROMPTS_EVERY
        await asyncio.wait(tasks, timeout=end - monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def differing(running: LocalDeployment, streams: list[WatchedStream]) -> list[str]:
    """The streams that get other text undisturbed: a few at a time, for which there is room."""
    begun = [stream for stream in streams if stream.text]
    alone = [WatchedStream(stream.name, stream.prompt_tokens) for stream in begun]
    gate = asyncio.Semaphore(UNDISTURBED)

    async def read(other: WatchedStream, chars: int) -> None:
        async with gate:
            await other.read(client, chars_max=chars)

    async with client_of(running.url) as client:
        await asyncio.gather(
            *(read(other, len(stream.text)) for other, stream in zip(alone, begun, strict=True))
        )
    assert not any(other.error for other in alone), [other.error for other in alone]
    return [
        stream.name
        for other, stream in zip(alone, begun, strict=True)
        if not other.text.startswith(stream.text)
    ]


def unlike(name: str, length: int) -> list[int]:
    """A prompt of so many tokens that shares no prefix with those of other names."""
    return [1_000 + (crc32(name.encode()) + 31 * place) % 20_000 for place in range(length)]


def main() -> int:
    """Run the trial, print what was seen, and return 0 if all of it is as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the trial takes")
    seconds = parser.parse_args().seconds
    chats = [WatchedStream(f"chat {number}") for number in range(CHATS)]
    prompts = [WatchedStream(f"prompt {number}", PROMPT_TOKENS) for number in range(PROMPTS)]
    with deployment(as_shipped=True) as running:
        asyncio.run(disturbed(running, chats, prompts, seconds))
        counts = {name: int(running.total("decode", name)) for name in COUNTED}
        for stream in chats + prompts:
            ended = f", ended: {stream.error}" if stream.error else ""
            _say(
                f"{stream.name:10} {len(stream.text):6} characters, longest pause {stream.longest_pause:5.1f} s{ended}"
            )
        for name, count in counts.items():
            _say(f"{name} {count}")
        others = asyncio.run(differing(running, chats + prompts))
    cut = [stream.name for stream in chats + prompts if stream.error and stream.text]
    slow = [stream.name for stream in chats + prompts if stream.longest_pause > PAUSE_SECONDS_MAX]
    _say(
        f"begun and ended in an error: {cut or 'none'}; paused for over {PAUSE_SECONDS_MAX:.0f} s: {slow or 'none'}"
    )
    _say(f"other text than undisturbed: {others or 'none'}")
    return int(bool(cut or slow or others or not counts["segue_retractions_total"]))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
