"""A process that offers pages and obeys one command a line on stdin: a holder to read from, freeze and kill.

Its first line is its `Holder`; then write, clear, stamp, spoil, read, busy each answer one line of JSON. Page i holds
the byte i % 251 + 1 until it is stamped.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec
import structlog

from shared.links.keys import parse_keys
from shared.transfer.transfer import Transfer
from shared.transfer.transports import open_offer
from shared.wire.baton import Baton
from tests.fetcher_contract import KV_FORMAT, LEASES, LIMITS, PageBuffer, byte_of
from tests.integration.transfer.holder_processes import network
from tests.integration.transfer.ranked_holders import HeldRank, whole_pages_here


def spin(seconds: float) -> int:
    """Python that never lets go of the processor, but for the interpreter's own switches."""
    end, turns = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        turns += sum(range(100)) > 0
    return turns


def say(line: str) -> None:
    """One line to the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def answer(transfer: Transfer, buffer: PageBuffer, command: str, arguments: list[str]) -> object:
    """Do what the line says."""
    pages = buffer.memory
    match command:
        case "write":
            lease, nonce, *named = map(int, arguments)
            transfer.words.write(lease, nonce, named or range(pages.pages))
            return None
        case "clear":
            transfer.words.clear(int(arguments[0]))
            return None
        case "stamp":
            nonce, *named = map(int, arguments)
            for number, page in enumerate(named):
                buffer.stamp(page, nonce, number)
            return None
        case "spoil":
            pages.clear(pages.known_page)
            return None
        case "read":  # as a reader that is going to die in the middle of it
            baton = msgspec.json.decode(" ".join(arguments), type=Baton)
            transfer.start(1, baton, 0, range(len(baton.pages)))
            return transfer.outstanding
        case "busy":
            say("null")
            return spin(float(arguments[0]))
    raise ValueError(command)


def make_buffer(memory: str, pages: int, page_bytes: int) -> PageBuffer:
    """On the host, or in a tensor."""
    if memory == "host":
        return PageBuffer(pages, page_bytes)
    from tests.tensor_pages import TensorPages  # torch takes seconds to load

    return TensorPages(memory, pages, page_bytes)


def fill(buffer: PageBuffer, held: HeldRank | None) -> None:
    """Each page with a byte of its own; of a rank, with its slices of `whole_pages_here`."""
    if held is None:
        for page in range(buffer.memory.pages):
            buffer.fill(page, byte_of(page))
    else:
        content = held.cut.gather(whole_pages_here(held.cut), held.rank).tobytes()
        buffer.map[: len(content)] = content


def main() -> None:
    """Arguments: uid, epoch, pages, bytes a page, transport, where the pages lie, file of keys; and of which rank."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    uid, epoch, pages, page_bytes, transport, memory, key_file, *rank = sys.argv[1:]
    held = msgspec.json.decode(rank[0], type=HeldRank) if rank else None
    buffer = held.buffer() if held else make_buffer(memory, int(pages), int(page_bytes))
    fill(buffer, held)
    where = network("tls" if transport == "tls" else "nixl")
    keys = parse_keys(key_file.encode(), "worker")
    number = held.rank if held else 0
    offer = open_offer(where, keys, (uid, int(epoch)), buffer.memory, LEASES, rank=number)
    transfer = Transfer(offer, buffer.memory, KV_FORMAT, limits=LIMITS, clock=time.monotonic)
    say(msgspec.json.encode(transfer.holder).decode())
    for line in sys.stdin:
        command, *arguments = line.split()
        say(json.dumps(answer(transfer, buffer, command, arguments)))


if __name__ == "__main__":
    main()
