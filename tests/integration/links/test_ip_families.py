"""Every listener of a process, over IPv4 and IPv6: probes, links and the router's API."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from router.discovery.worker_address import static_workers
from router.listener.server import listen as listen_for_clients
from shared.primitives.errors import ConfigError
from shared.process.admin_port import AdminPort, AnswerPath
from shared.process.health import Health, probe_pages
from shared.process.listening import listening_socket
from shared.process.metrics import Metrics
from tests.integration.links.watched_links import Watched, dial, listen

LOOPBACKS = {"127.0.0.1": "127.0.0.1", "::1": "[::1]"}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pages() -> AnswerPath:
    return probe_pages(Health(60.0), Metrics("decode"))


def live(port: int, host: str) -> int:
    with urllib.request.urlopen(f"http://{host}:{port}/livez", timeout=5) as answer:
        return int(answer.status)


@pytest.mark.parametrize("client", LOOPBACKS.values())
def test_probes_that_listen_everywhere_answer_in_both_families(client: str) -> None:
    with contextlib.closing(AdminPort("*", 0, pages())) as probes:
        assert live(probes.port, client) == 200


@pytest.mark.parametrize("host", LOOPBACKS)
def test_probes_listen_at_one_address_of_either_family(host: str) -> None:
    with contextlib.closing(AdminPort(host, 0, pages())) as probes:
        assert live(probes.port, LOOPBACKS[host]) == 200


@pytest.mark.parametrize("client", LOOPBACKS)
def test_a_router_that_listens_everywhere_takes_clients_of_both_families(client: str) -> None:
    with listen_for_clients("*", 0) as listener:
        listener.listen()
        with socket.create_connection((client, listener.getsockname()[1]), timeout=5):
            accepted, _ = listener.accept()
            accepted.close()


@pytest.mark.parametrize("client", LOOPBACKS.values())
def test_workers_that_listen_everywhere_are_dialed_in_both_families(stack: ExitStack, client: str) -> None:
    port = listen(stack, host="*").address.rpartition(":")[2]
    Watched(dial(stack, f"tcp://{client}:{port}")).until_up()


def test_a_worker_at_an_ipv6_address_gives_an_address_that_can_be_dialed(stack: ExitStack) -> None:
    worker = listen(stack, host="::1")
    assert worker.address.startswith("tcp://[::1]:")
    Watched(dial(stack, worker.address)).until_up()


def test_a_listed_worker_with_an_ipv6_address_is_written_in_brackets() -> None:
    [worker] = static_workers(["decode=[::1]:8002"])
    assert worker.url == "tcp://[::1]:8002"
    with pytest.raises(ConfigError, match="in brackets"):
        static_workers(["decode=::1:8002"])


def test_where_the_kernel_has_no_ipv6_everywhere_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    listener, address = listening_socket("*")
    with listener:
        assert (listener.family, address) == (socket.AF_INET, "0.0.0.0")
