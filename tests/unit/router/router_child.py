"""A router with scripted workers in a process of its own, with little memory: `python -m … FOLDER CONTEXT_LEN`.

Its limit is 1 GiB of address space, of which threads reserve more than they use. It prints its URL, and ends when its
standard input does.
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
        print(router.url, flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
