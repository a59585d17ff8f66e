"""`segue doctor --live URL…`: reads the metrics of a deployment twice, ten seconds apart, and names its bottleneck.

A URL is that of an admin port. A name that stands for several addresses, as that of a headless Service does, is read at
each of them, all at once. Who asks at night may ask because a pod hangs: a process that does not answer is named and
left out, and the others are judged by `bottleneck`. What answers with no metrics is a wrong URL, and ends the command.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from shared.local.bottleneck import LiveVerdict, Sample, Scrape, verdict
from shared.primitives.errors import DoctorError

WINDOW_SECONDS = 10.0
PAGE_SECONDS_MAX = 5.0  # to connect, and once more for all of a page
PAGE_BYTES_MAX = 8 << 20  # a page has a few hundred lines
PAGE_SAMPLES_MAX = 20_000
PROCESSES_MAX = 256
READERS = 32  # pages that are read at a time
METRICS_PATH = "/metrics"
ADMIN_PORT = 8001

Address = tuple[str, int, str]  # host, port and path


def live_doctor(
    urls: Sequence[str], *, as_json: bool = False, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Print the verdict. Raises DoctorError where a page cannot be read, or no router's is among them."""
    addresses = [address for url in urls for address in addresses_of(url)]
    if len(addresses) > PROCESSES_MAX:
        raise DoctorError(
            f"{len(addresses)} processes are named; expected at most {PROCESSES_MAX}: name fewer"
        )
    before, silent = scrape(addresses)
    if not before.processes:
        raise DoctorError(next(iter(silent.values())))
    if not as_json:
        sys.stdout.write(f"reading {_processes(len(before.processes))} for {WINDOW_SECONDS:g} s\n")
        sys.stdout.flush()
    sleep(WINDOW_SECONDS)
    after, silent_now = scrape(addresses)
    silent |= silent_now
    try:
        found = verdict(before, after)
    except ValueError as error:
        expected = (
            "; ".join(silent.values()) or "give the URL of a router's admin port, as segue up prints it"
        )
        raise DoctorError(f"{error}: {expected}") from None
    found = replace(
        found, figures=(*(f"left out: {sentence}" for sentence in silent.values()), *found.figures)
    )
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        _write(found)


def addresses_of(url: str) -> list[Address]:
    """Host, port and path of each process that a URL stands for; raises DoctorError where there is none."""
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    try:
        port = parts.port or ADMIN_PORT
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise DoctorError(f"{url} is no URL of an admin port; expected one like http://127.0.0.1:8001")
    path = parts.path if parts.path not in ("", "/") else METRICS_PATH
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DoctorError(f"{parts.hostname} is no name that is known here: {error.strerror}") from None
    family = found[0][0]  # a host with an IPv4 and an IPv6 address is one process
    hosts = dict.fromkeys(str(address[0]) for each, *_, address in found if each == family)
    return [(host, port, path) for host in hosts]


def scrape(addresses: Sequence[Address]) -> tuple[Scrape, dict[str, str]]:
    """What these processes show now, and by address why others show nothing.

    Raises DoctorError where one answers, and not with metrics.
    """
    with ThreadPoolExecutor(min(READERS, len(addresses))) as readers:
        pages = list(readers.map(_page_or_why, addresses))
    names = [f"{host}:{port}" for host, port, _ in addresses]
    shown = {name: page for name, page in zip(names, pages, strict=True) if not isinstance(page, str)}
    silent = {name: page for name, page in zip(names, pages, strict=True) if isinstance(page, str)}
    return Scrape(time.monotonic(), shown), silent


def samples_of(page: str) -> list[Sample]:
    """The finite values of a page of metrics; raises ValueError where it is none, or one without end."""
    families = text_string_to_metric_families(page)
    lines = list(islice((each for family in families for each in family.samples), PAGE_SAMPLES_MAX + 1))
    if len(lines) > PAGE_SAMPLES_MAX:
        raise ValueError(f"more than {PAGE_SAMPLES_MAX} lines")
    return [Sample(each.name, each.labels, each.value) for each in lines if isfinite(each.value)]


def _page_or_why(address: Address) -> list[Sample] | str:
    """The samples of a page, or why nothing answers."""
    host, port, path = address
    connection = http.client.HTTPConnection(host, port, timeout=PAGE_SECONDS_MAX)
    try:
        connection.connect()
        with _deadline(connection.sock):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(PAGE_BYTES_MAX)
        if answer.status != 200:
            raise DoctorError(f"http://{host}:{port}{path} answers {answer.status}, not with metrics")
        return samples_of(body.decode())
    except (OSError, http.client.HTTPException) as error:
        return f"nothing answers at http://{host}:{port}{path} ({error or type(error).__name__})"
    except ValueError:
        raise DoctorError(f"what http://{host}:{port}{path} answers are no metrics") from None
    finally:
        connection.close()


@contextmanager
def _deadline(connected: socket.socket) -> Iterator[None]:
    """Raise TimeoutError after `PAGE_SECONDS_MAX`: the time-out of a socket begins anew with each byte."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with suppress(OSError):  # it is closed
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(PAGE_SECONDS_MAX, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if over.is_set():
            raise TimeoutError(f"no whole page within {PAGE_SECONDS_MAX:g} seconds")


def _write(found: LiveVerdict) -> None:
    name = " or ".join(found.candidates)
    sys.stdout.write(f"bottleneck: {found.cause}{f' ({name})' if name else ''}\n")
    for figure in found.figures:
        sys.stdout.write(f"      {_printable(figure)}\n")
    sys.stdout.write(f"turn: {_printable(found.turn)}\n")


def _printable(text: str) -> str:
    """Text with names that others have chosen, for a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
