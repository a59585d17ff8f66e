"""What a stranger may connect to, with real sockets: `helm test` runs the same."""

from __future__ import annotations

import socket

import pytest

from shared.local import isolation_test
from shared.local.isolation_test import ClosedPorts
from shared.primitives.errors import SmokeTestError

HOSTS = ("127.0.0.1", "::1")


@pytest.fixture
def closed_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
    return port


def test_ports_where_nobody_answers_pass_and_are_counted(closed_port: int) -> None:
    [found] = isolation_test.isolation_test([ClosedPorts("127.0.0.1", (closed_port,))])
    assert found == "none of 1 ports of 1 pods of 127.0.0.1 lets a stranger connect"


@pytest.mark.parametrize("host", HOSTS)
def test_one_open_port_among_closed_ones_fails_the_test_and_is_named(host: str, closed_port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            SmokeTestError, match=f"connected to {host} port {port}: the network of this cluster"
        ):
            isolation_test.isolation_test([ClosedPorts(host, (closed_port, port))])


def test_a_peer_that_swallows_connections_does_not_hold_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_test, "CONNECT_SECONDS_MAX", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(3)]
        for each in held:  # until its backlog is full, it drops what comes
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        found = isolation_test.isolation_test([ClosedPorts("127.0.0.1", (full.getsockname()[1],))])
        for each in held:
            each.close()
    assert len(found) == 1


def test_a_name_without_an_address_proves_nothing_and_fails() -> None:
    with pytest.raises(SmokeTestError, match="nothing was proven: are its pods Ready"):
        isolation_test.isolation_test([ClosedPorts("segue-decode.invalid", (8002,))])


@pytest.mark.parametrize("text", ["host", "host:", "host:a", ":1", "host:1-b"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(SmokeTestError, match="expected HOST:PORT"):
        ClosedPorts.parse(text)


def test_ports_are_listed_one_by_one_and_as_ranges() -> None:
    assert ClosedPorts.parse("a.b:8002,20000-20002") == ClosedPorts("a.b", (8002, 20000, 20001, 20002))
