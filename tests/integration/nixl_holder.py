"""A process that offers pages over NIXL and obeys one command a line on stdin: a holder to read from, freeze and kill.

Its first line is its `Holder`; then write, clear, read, busy each answer one line of JSON. Page i holds the
byte i % 251 + 1.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec

from shared.baton import Baton
from shared.transfer.nixl import NixlTransfer
from tests.fetcher_contract import KV_FORMAT, LEASES, LIMITS, PageBuffer, byte_of


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


def answer(transfer: NixlTransfer, command: str, arguments: list[str]) -> object:
    """Do what the line says."""
    match command:
        case "write":
            transfer.words.write(int(arguments[0]), int(arguments[1]))
            return None
        case "clear":
            transfer.words.clear(int(arguments[0]))
            return None
        case "read":  # as a reader that is going to die in the middle of it
            baton = msgspec.json.decode(" ".join(arguments), type=Baton)
            transfer.start(1, baton, 0, range(len(baton.pages)))
            return transfer.outstanding
        case "busy":
            say("null")
            return spin(float(arguments[0]))
    raise ValueError(command)


def main() -> None:
    """Arguments: uid, epoch, pages, bytes a page, range of ports."""
    uid, epoch, pages, page_bytes, ports = sys.argv[1:]
    buffer = PageBuffer(int(pages), int(page_bytes))
    for page in range(int(pages)):
        buffer.fill(page, byte_of(page))
    transfer = NixlTransfer(
        uid,
        int(epoch),
        buffer.memory,
        LEASES,
        KV_FORMAT,
        interface="lo",
        ports=ports,
        limits=LIMITS,
        clock=time.monotonic,
    )
    say(msgspec.json.encode(transfer.holder).decode())
    for line in sys.stdin:
        command, *arguments = line.split()
        say(json.dumps(answer(transfer, command, arguments)))


if __name__ == "__main__":
    main()
