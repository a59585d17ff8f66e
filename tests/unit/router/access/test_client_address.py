"""A client is known by its address: that of its connection, or the one that a trusted proxy names."""

from __future__ import annotations

import http.client
from pathlib import Path

import msgspec
import pytest

from router.request_context import client_of, tenant_of
from tests.unit.router.request_contexts import scope_of
from tests.unit.router.scripted_workers import MODEL, RunningRouter


def ask(router: RunningRouter, source: str, **headers: str) -> str:
    """Send a request from an address of loopback; returns the tenant as workers see it."""
    port = int(router.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, source_address=(source, 0))
    body = msgspec.json.encode({"model": MODEL, "prompt": "fox"})
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **names})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()
    return router.last_prefill.tenant


def test_clients_of_different_addresses_are_different_tenants(router: RunningRouter) -> None:
    first, second = ask(router, "127.0.0.2"), ask(router, "127.0.0.3")
    assert first != second
    assert first == ask(router, "127.0.0.2")
    assert "127.0.0" not in first + second


def test_what_a_client_says_of_itself_is_ignored(router: RunningRouter) -> None:
    plain = ask(router, "127.0.0.1")
    assert ask(router, "127.0.0.1", X_Forwarded_For="10.0.0.7") == plain


def test_a_trusted_proxy_names_its_clients(model_folder: Path) -> None:
    with RunningRouter(model_folder, trusted_proxies=("127.0.0.0/29",)) as router:
        named = ask(router, "127.0.0.2", X_Forwarded_For="10.0.0.7")
        assert named != ask(router, "127.0.0.2", X_Forwarded_For="10.0.0.8")
        assert named == ask(router, "127.0.0.3", X_Forwarded_For="10.0.0.7")
        assert named != ask(router, "127.0.0.9", X_Forwarded_For="10.0.0.7"), "not a trusted proxy"


@pytest.mark.parametrize(
    ("host", "tenant"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown" * 20, ("unknown" * 20)[:64]),
    ],
)
def test_an_ipv6_client_is_its_network(host: str, tenant: str) -> None:
    assert tenant_of(scope_of(client=(host, 1))) == client_of((host, 1, 0, 3)) == tenant


def test_a_connection_without_an_address_has_no_name() -> None:
    assert tenant_of(scope_of(client=None)) == client_of(None) == client_of("/run/router.sock") == ""
