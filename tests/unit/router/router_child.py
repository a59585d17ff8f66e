"""A router with scripted workers in a process of its own, with little memory: `… FOLDER CONTEXT_LEN [silent]`.

Its limit is 1 GiB of address space, of which threads reserve more than they use. It prints its URL, then for each line
of its standard input how many requests are live, and ends with that input. `silent`: its workers answer nothing.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import msgspec
import structlog

from router.text.tokenizer import hide_torch

hide_torch()  # as a router does, before anything imports transformers

from tests.unit.router.scripted_workers import LIMITS, RunningRouter  # noqa: E402

ADDRESS_SPACE_BYTES = 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    limits = msgspec.structs.replace(LIMITS, context_len=int(sys.argv[2]))
    with RunningRouter(Path(sys.argv[1]), limits=limits) as router:
        router.workers.script.silent = "silent" in sys.argv
        print(router.url, flush=True)  # noqa: T201
        for _ in sys.stdin:
            print(len(router.core._requests.live), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
