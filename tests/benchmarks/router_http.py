"""What a streamed completion costs the router in CPU time over HTTP: the real server, workers that a script plays.

    python -m tests.benchmarks.router_http [--requests 1024] [--tokens 100] [--runs 5] [--log-level info] 2>/dev/null

The client is a process of its own. Of the router's process it is all the CPU time, the script's among it, so it is for
comparing two versions: run them in turns, and compare the least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from shared.process import logs
from tests.unit.router.scripted_workers import MODEL, RunningRouter
from tests.unit.router.tiny_model import write_folder

TOGETHER = 16  # connections
CLIENT = "--client"


async def complete(port: int, number: int, tokens: int) -> None:
    """One streamed completion on a connection of its own, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {"model": MODEL, "prompt": f"The fox {number}", "max_tokens": tokens, "stream": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    assert b"[DONE]" in answer, answer[-300:]
    writer.close()


async def load(port: int, requests: int, tokens: int) -> None:
    """All requests, `TOGETHER` at a time."""
    numbers = iter(range(requests))

    async def connection() -> None:
        for number in numbers:
            await complete(port, number, tokens)

    await asyncio.gather(*(connection() for _ in range(TOGETHER)))


def measure(router: RunningRouter, requests: int, tokens: int) -> float:
    """CPU seconds of this process for each completion."""
    port = urlsplit(router.url).port
    command = [sys.executable, "-m", "tests.benchmarks.router_http", CLIENT, str(port)]
    began = time.process_time()
    subprocess.run([*command, "--requests", str(requests), "--tokens", str(tokens)], check=True)
    return (time.process_time() - began) / requests


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.router_http", description="CPU time of a streamed completion"
    )
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--log-level", choices=("info", "warning"), default="warning")
    parser.add_argument(CLIENT, type=int, default=0, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(load(given.client, given.requests, given.tokens))
        return
    logs.configure(given.log_level, "json")
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        with RunningRouter(Path(folder)) as router:
            router.workers.script.endless = True
            measure(router, TOGETHER, given.tokens)
            spent = [measure(router, given.requests, given.tokens) for _ in range(given.runs)]
    sys.stdout.write(
        f"{given.tokens} tokens: {1e3 * min(spent):.3f} ms of CPU, the least of {given.runs} runs\n"
    )


if __name__ == "__main__":
    main()
