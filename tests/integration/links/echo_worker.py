"""A worker process that answers each `Cancel` with a `Refused` of the same rid, for tests and measurements.

After a `Cancel` of the rid DEAF it reads nothing of its links until it gets SIGUSR1.

    python -m tests.integration.links.echo_worker KEYS_FILE EPOCH [PORT]

Prints the address it listens on, then serves until its standard input ends.
"""

from __future__ import annotations

import signal
import sys
import threading

from shared.links.events import Received
from shared.links.keys import read_keys
from shared.links.sockets import WorkerLinks
from shared.wire.messages import Cancel, Hello, Refused
from tests.link_settings import link_settings, write_note

DEAF = "be deaf"


def main(keys_file: str, epoch: str, port: str = "0") -> None:
    hello = Hello(session=0, role="decode", uid="echo", epoch=int(epoch))
    links = WorkerLinks(
        "127.0.0.1", int(port), read_keys(keys_file, "worker"), hello, link_settings(), write_note=write_note
    )
    sys.stdout.write(links.address + "\n")
    sys.stdout.flush()
    ended = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # of all threads: `sigwait` takes it

    def watch() -> None:
        sys.stdin.read()
        ended.set()
        links.wake()

    threading.Thread(target=watch, daemon=True).start()
    while not ended.is_set():
        for event in links.receive(10.0):
            if isinstance(event, Received) and isinstance(event.message, Cancel):
                links.send(event.peer, Refused(event.message.rid, 0, "stale"))
                if event.message.rid == DEAF:
                    signal.sigwait({signal.SIGUSR1})
    links.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
