"""Which transport carries KV between workers, and where this worker is reached by it.

UCX authenticates nobody: over TCP, one packet from anybody writes any address of the process (docs/security.md). So
NIXL is for what others cannot reach: one machine (interface `lo`: shared memory, no port), or RDMA. Everything else
goes by TLS, and then UCX is not even loaded. NIXL over TCP on another interface needs a setting that says so.

The rule looks at this worker's settings alone, never at its peers: all workers of a deployment come to the same answer,
and those that do not are never paired, for the transport is part of the KV format.
"""

from __future__ import annotations

import fcntl
import math
import resource
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from shared.links.keys import LinkKeys
from shared.primitives.errors import ConfigError, TransferError
from shared.transfer.grants import Grants
from shared.transfer.memory import PageMemory
from shared.transfer.offer import Offer
from shared.transfer.protocol import KvTransport
from shared.transfer.tls.transport import TlsOffer
from shared.transfer.ucx import LOOPBACK

RDMA_DEVICES = Path("/sys/class/infiniband")
PROCESS_STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 1 << 14  # as capability.h numbers it
_SIOCGIFADDR = 0x8915
# of documentation: nobody is there
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True)
class KvNetwork:
    """The settings that decide how pages travel."""

    choice: KvTransport
    interface: str
    ports: str  # "20000-20999"
    unauthenticated_tcp: bool = False
    devices: tuple[str, ...] = ()  # of RDMA, each with its port: "mlx5_0:1"

    @property
    def transport(self) -> str:
        """nixl or tls."""
        if self.choice != "auto":
            return self.choice
        return "nixl" if self.interface == LOOPBACK else "tls"

    @property
    def name_in_kv_format(self) -> str:
        """The transport as workers compare it. TLS is "sealed" there: workers of the release before call it so."""
        return "sealed" if self.transport == "tls" else self.transport

    @property
    def port_range(self) -> range:
        first, last = (int(port) for port in self.ports.split("-"))
        return range(first, last + 1)

    @property
    def nixl_tcp(self) -> bool:
        """Whether the user may have UCX listen on TCP. On loopback it takes a UCX_TLS of the user's own."""
        return self.interface == LOOPBACK or self.unauthenticated_tcp


def open_offer(
    network: KvNetwork,
    keys: LinkKeys,
    identity: tuple[str, int],
    pages: PageMemory,
    lease_count: int,
    *,
    rank: int = 0,
    grants: Grants | None = None,
) -> Offer:
    """Offer the memory of a rank of this worker; `identity` is (uid, epoch). `grants` are those of rank 0's offer.

    `StartError` in one sentence when that cannot be.
    """
    uid, epoch = identity
    refuse_useless_devices(network)
    if network.transport == "tls":
        address = address_of_interface(network.interface)
        return TlsOffer(
            uid,
            epoch,
            pages,
            lease_count,
            address=address,
            ports=network.port_range,
            keys=keys,
            rank=rank,
            grants=grants,
        )
    refuse_nixl_without_network(network, RDMA_DEVICES)
    refuse_pages_that_cannot_be_pinned(network, pages, pinnable_bytes())
    from shared.transfer.nixl import NixlOffer  # it changes the environment for UCX, and loads it

    return NixlOffer(
        uid,
        epoch,
        pages,
        lease_count,
        interface=network.interface,
        ports=network.ports,
        tcp=network.nixl_tcp,
        devices=network.devices,
        rank=rank,
    )


def refuse_useless_devices(network: KvNetwork) -> None:
    """RDMA is NIXL's, and between hosts. `ConfigError` when devices are named that nothing would use."""
    named = ",".join(network.devices)
    if named and network.transport != "nixl":
        raise ConfigError(
            f"kv_devices names {named}, but the TLS transport uses TCP: leave kv_devices empty, or say "
            "kv_transport nixl where only workers are on the RDMA fabric"
        )
    if named and network.interface == LOOPBACK:
        raise ConfigError(
            f"kv_devices names {named}, but kv_interface lo keeps KV on this machine: leave kv_devices empty, or name "
            "the network's interface"
        )


def refuse_nixl_without_network(network: KvNetwork, rdma_devices: Path) -> None:
    """Between hosts NIXL needs RDMA, or leave to use TCP. `ConfigError` when it has neither.

    Of the devices named at least one must be here: one list may serve nodes whose devices have other names.
    """
    here = sorted(device.name for device in rdma_devices.iterdir()) if rdma_devices.is_dir() else []
    if network.devices and not {name.partition(":")[0] for name in network.devices} & set(here):
        raise ConfigError(
            f"kv_devices names {','.join(network.devices)}, and {rdma_devices} has {', '.join(here) or 'no device'}: "
            "name one that is there, or give the worker the device"
        )
    if network.nixl_tcp or network.devices or (here and not network.interface):
        return
    missing = f"kv_devices names none of {', '.join(here)}" if here else "there is no RDMA device"
    raise ConfigError(
        f"kv_transport nixl on interface {network.interface or 'any'} would take KV from anybody over TCP, and "
        f"{missing}: {'name one, ' if here else ''}choose tls, or say kv_allow_unauthenticated_tcp where only "
        "workers reach the ports"
    )


def refuse_pages_that_cannot_be_pinned(network: KvNetwork, pages: PageMemory, limit: float) -> None:
    """RDMA pins host pages twice: to offer them, and to read into them. `ConfigError` where that is beyond `limit`.

    Pages in VRAM do not count towards the limit, and what UCX pins for itself is not known here.
    """
    needed = 2 * pages.size_bytes
    if not network.devices or pages.memory != "DRAM" or needed <= limit:
        return
    raise ConfigError(
        f"RDMA pins the KV pages twice, {needed / 2**20:.0f} MiB, and this process may pin {limit / 2**20:.0f} "
        "(ulimit -l): set LimitMEMLOCK=infinity for the node's container runtime, or rdma.runAsRoot in the chart"
    )


def pinnable_bytes(status: Path = PROCESS_STATUS) -> float:
    """How many bytes this process may pin; infinite without a limit, and for whom the kernel asks for none."""
    for line in status.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) & CAP_IPC_LOCK:
            return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if limit == resource.RLIM_INFINITY else float(limit)


def address_of_interface(name: str) -> str:
    """The numeric address of an interface; of the one that leads outside for an empty name. `TransferError`: none."""
    address = (_ipv4_of(name) or _ipv6_of(name)) if name else _address_towards_others()
    if not address:
        raise TransferError(
            f"interface {name} has no address: name another with --kv-interface"
            if name
            else "no interface leads outside: name the one for KV pages with --kv-interface"
        )
    return address


def _ipv4_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def _ipv6_of(name: str) -> str:
    """First address of an interface that is not link-local; "" if it has none."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    for digits, _, _, scope, _, interface in rows:
        if interface == name and scope != "20":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def _address_towards_others() -> str:
    """Where a packet to somewhere else would come from; none is sent."""
    for family, somewhere in _ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((somewhere, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""
