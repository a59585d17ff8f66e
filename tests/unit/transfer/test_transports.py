"""Which transport a worker takes, and what is refused before anything listens."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from shared.primitives.errors import ConfigError, TransferError
from shared.transfer import transports
from shared.transfer.protocol import KvTransport
from shared.transfer.tls.transport import TlsAddress
from shared.transfer.transports import (
    KvNetwork,
    address_of_interface,
    open_offer,
    pinnable_bytes,
    refuse_nixl_without_network,
    refuse_pages_that_cannot_be_pinned,
)
from shared.transfer.ucx import WITHOUT_TCP, configure_ucx, names_tcp
from tests.fetcher_contract import LEASES, PageBuffer
from tests.link_keys import new_keys


@pytest.mark.parametrize(
    ("choice", "interface", "transport"),
    [
        ("auto", "lo", "nixl"),
        ("auto", "eth0", "tls"),
        ("auto", "", "tls"),
        ("tls", "lo", "tls"),
        ("nixl", "eth0", "nixl"),
    ],
)
def test_auto_takes_nixl_on_one_machine_alone(choice: KvTransport, interface: str, transport: str) -> None:
    assert KvNetwork(choice, interface, "1-2").transport == transport


@pytest.mark.parametrize(("choice", "name"), [("nixl", "nixl"), ("tls", "sealed")])
def test_the_kv_format_names_transports_as_the_release_before_does(choice: KvTransport, name: str) -> None:
    """Workers of two releases fetch from each other during an upgrade only if their KV formats are the same text."""
    assert KvNetwork(choice, "eth0", "1-2").name_in_kv_format == name


def test_the_address_of_a_tls_holder_has_the_bytes_of_the_release_before() -> None:
    written = msgspec.msgpack.encode(TlsAddress("10.0.0.7", 20000))
    assert written == b"\x83\xa4type\xa8sealed/1\xa4host\xa810.0.0.7\xa4port\xcdN "


@pytest.mark.parametrize("interface", ["eth0", ""])
def test_nixl_between_hosts_is_refused_without_rdma_and_without_leave(interface: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"from anybody over TCP.*choose tls"):
        refuse_nixl_without_network(KvNetwork("nixl", interface, "1-2"), tmp_path / "none")
    refuse_nixl_without_network(
        KvNetwork("nixl", interface, "1-2", unauthenticated_tcp=True), tmp_path / "none"
    )
    refuse_nixl_without_network(KvNetwork("nixl", "lo", "1-2"), tmp_path / "none")


def test_an_rdma_device_beside_an_interface_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    refuse_nixl_without_network(KvNetwork("nixl", "", "1-2"), tmp_path)  # UCX takes what it finds
    refuse_nixl_without_network(KvNetwork("nixl", "eth0", "1-2", devices=("mlx5_0:1",)), tmp_path)
    with pytest.raises(ConfigError, match="kv_devices names none of mlx5_0: name one"):
        refuse_nixl_without_network(KvNetwork("nixl", "eth0", "1-2"), tmp_path)


def test_one_list_of_devices_may_serve_nodes_that_differ(tmp_path: Path) -> None:
    network = KvNetwork("nixl", "eth0", "1-2", devices=("mlx5_0:1", "mlx5_bond_0:1"))
    with pytest.raises(ConfigError, match=r"names mlx5_0:1,mlx5_bond_0:1, and .* has no device"):
        refuse_nixl_without_network(network, tmp_path / "none")
    (tmp_path / "mlx5_9").mkdir()
    with pytest.raises(ConfigError, match="has mlx5_9: name one that is there"):
        refuse_nixl_without_network(network, tmp_path)
    (tmp_path / "mlx5_bond_0").mkdir()
    refuse_nixl_without_network(network, tmp_path)


@pytest.mark.parametrize(
    ("choice", "interface", "sentence"),
    [
        ("auto", "eth0", "the TLS transport uses TCP"),
        ("tls", "eth0", "the TLS transport uses TCP"),
        ("nixl", "lo", "kv_interface lo keeps KV on this machine"),
    ],
)
def test_devices_that_nothing_would_use_are_refused(
    choice: KvTransport, interface: str, sentence: str
) -> None:
    network = KvNetwork(choice, interface, "1-2", devices=("mlx5_0:1",))
    with pytest.raises(ConfigError, match=rf"kv_devices names mlx5_0:1, but {sentence}"):
        open_offer(network, new_keys()["worker"], ("w", 1), PageBuffer().memory, LEASES)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, str]]:
    """The environment with none of UCX's variables; what is set in it goes when the test ends."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("UCX_")})
        yield os.environ


def test_ucx_uses_the_interface_and_the_devices_that_are_named(variables: Mapping[str, str]) -> None:
    configure_ucx("eth0", "", tcp=False)
    assert variables["UCX_NET_DEVICES"] == "eth0"
    configure_ucx("eth0", "", tcp=False, devices=("mlx5_0:1", "mlx5_1:1"))
    assert variables["UCX_NET_DEVICES"] == "eth0,mlx5_0:1,mlx5_1:1"
    configure_ucx("", "", tcp=False, devices=("mlx5_0:1",))
    assert variables["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_ucx_copies_between_gpus_unless_told_not_to(variables: Mapping[str, str]) -> None:
    configure_ucx("lo", "", tcp=True)
    assert variables["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "off"
    configure_ucx("lo", "", tcp=True)
    assert variables["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "off"


def test_a_worker_refuses_nixl_without_network_before_it_offers_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transports, "RDMA_DEVICES", tmp_path / "none")
    network = KvNetwork("nixl", "eth0", "20000-20007")
    with pytest.raises(ConfigError, match="choose tls"):
        open_offer(network, new_keys()["worker"], ("w", 1), PageBuffer().memory, LEASES)


@pytest.mark.parametrize("chosen", ["tcp", "all", "rc,tcp,cma", "^cma", " tcp "])
def test_ucx_is_not_let_onto_tcp_by_the_environment(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    assert names_tcp(chosen)
    with pytest.raises(TransferError, match="UCX_TLS is"):
        configure_ucx("", "", tcp=False)
    configure_ucx("", "", tcp=True)


@pytest.mark.parametrize("chosen", [WITHOUT_TCP, "rc,cma", "^tcp,cma"])
def test_what_names_no_tcp_stays(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    configure_ucx("", "", tcp=False)
    assert not names_tcp(chosen)


def test_without_leave_ucx_is_told_to_leave_tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "")
    monkeypatch.delenv("UCX_TLS")
    configure_ucx("", "", tcp=False)
    assert os.environ["UCX_TLS"] == WITHOUT_TCP


def test_an_interface_has_its_address() -> None:
    assert address_of_interface("lo") == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(
        TransferError, match="interface nope0 has no address: name another with --kv-interface"
    ):
        address_of_interface("nope0")


RDMA = KvNetwork("nixl", "eth0", "20000-20007", devices=("mlx5_0:1",))


def test_pages_that_rdma_cannot_pin_are_refused_before_anything_listens() -> None:
    buffer = PageBuffer()
    twice = 2.0 * buffer.memory.size_bytes
    refuse_pages_that_cannot_be_pinned(RDMA, buffer.memory, twice)
    with pytest.raises(
        ConfigError, match=r"this process may pin 32 \(ulimit -l\): set LimitMEMLOCK=infinity"
    ):
        refuse_pages_that_cannot_be_pinned(RDMA, buffer.memory, twice - 1)
    over_tcp = KvNetwork("nixl", "eth0", "20000-20007", unauthenticated_tcp=True)
    refuse_pages_that_cannot_be_pinned(over_tcp, buffer.memory, 0.0)


def test_the_limit_of_pinned_memory_is_that_of_the_process_but_with_ipc_lock(tmp_path: Path) -> None:
    status, before = tmp_path / "status", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        status.write_text("Name:\tpython\nCapEff:\t0000000000000000\n", encoding="utf-8")
        assert pinnable_bytes(status) == 65536
        status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n", encoding="utf-8")
        assert pinnable_bytes(status) == math.inf
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert pinnable_bytes() > 0
