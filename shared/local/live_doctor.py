"""`segue doctor --live URL…`: reads the metrics of a deployment twice, ten seconds apart, and names its bottleneck.

A URL is that of an admin port. A name that stands for several addresses, as that of a headless Service does, is read at
each of them. The first page that is not there ends the command; what is there is judged by `bottleneck`.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from shared.local.bottleneck import LiveVerdict, Sample, Scrape, verdict
from shared.primitives.errors import DoctorError

WINDOW_SECONDS = 10.0
PAGE_SECONDS_MAX = 5.0
PAGE_BYTES_MAX = 8 << 20  # a page has a few hundred lines
METRICS_PATH = "/metrics"
ADMIN_PORT = 8001


def live_doctor(
    urls: Sequence[str], *, as_json: bool = False, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Print the verdict. Raises DoctorError where a page cannot be read, or no router's is among them."""
    addresses = [address for url in urls for address in addresses_of(url)]
    before = scrape(addresses)
    if not as_json:
        sys.stdout.write(f"reading {_processes(len(addresses))} for {WINDOW_SECONDS:g} s\n")
        sys.stdout.flush()
    sleep(WINDOW_SECONDS)
    try:
        found = verdict(before, scrape(addresses))
    except ValueError as error:
        expected = "give the URL of a router's admin port, as segue up prints it"
        raise DoctorError(f"{error}: {expected}") from None
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        _write(found)


def addresses_of(url: str) -> list[tuple[str, int, str]]:
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


def scrape(addresses: Sequence[tuple[str, int, str]]) -> Scrape:
    """What these processes show now; raises DoctorError where one shows nothing."""
    return Scrape(
        time.monotonic(), {f"{host}:{port}": _page(host, port, path) for host, port, path in addresses}
    )


def samples_of(page: str) -> list[Sample]:
    """The lines of a page of metrics; raises ValueError where it is none."""
    families = text_string_to_metric_families(page)
    return [Sample(each.name, each.labels, each.value) for family in families for each in family.samples]


def _page(host: str, port: int, path: str) -> list[Sample]:
    connection = http.client.HTTPConnection(host, port, timeout=PAGE_SECONDS_MAX)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(PAGE_BYTES_MAX)
        if answer.status != 200:
            raise DoctorError(f"http://{host}:{port}{path} answers {answer.status}, not with metrics")
        return samples_of(body.decode())
    except (OSError, http.client.HTTPException) as error:
        raise DoctorError(
            f"nothing answers at http://{host}:{port}{path} ({error or type(error).__name__})"
        ) from None
    except ValueError:
        raise DoctorError(f"what http://{host}:{port}{path} answers are no metrics") from None
    finally:
        connection.close()


def _write(found: LiveVerdict) -> None:
    name = " or ".join(found.candidates)
    sys.stdout.write(f"bottleneck: {found.cause}{f' ({name})' if name else ''}\n")
    for figure in found.figures:
        sys.stdout.write(f"      {figure}\n")
    sys.stdout.write(f"turn: {found.turn}\n")


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
