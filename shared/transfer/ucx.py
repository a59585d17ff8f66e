"""UCX's settings, and the transport that UCX chose: the only place that knows its environment variables.

UCX reads its settings from the environment, when its library is loaded and when a backend is made. Variables that the
user has set stay, except those that keep the KV plane where the network policy expects it: UCX neither authenticates
nor encrypts. It has no call that returns the transport of a read; on request it prints a table for each kind of
connection. Those tables go into a file in memory and are read here:

    | pod-1f-r1 intra-node cfg#1                                         |
    | remote memory read by ucp_get*(multi) into host memory from host   |
    | Range  | Description | Config                                      |
    | 0..inf | zero-copy   | cma/memory                                  |
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence

from shared.primitives.errors import TransferError

WITHOUT_TCP = "^tcp"
LOOPBACK = "lo"
# UCX's transports within a machine; alone they must notice lost peers
SHARED_MEMORY = ("POSIX", "SYSV", "CMA")
LOG_LINK = "/proc/self/fd/"
READ_TABLE = re.compile(r"remote memory read by ucp_get")
LAST_RANGE = re.compile(r"\.\.inf\s*\|[^|]*\|\s*([^|]*?)\s*\|")


def configure_ucx(interface: str, ports: str, *, tcp: bool, devices: Sequence[str] = ()) -> None:
    """Confine UCX to a network interface ("lo") and a range of TCP ports ("20000-20999"); empty: UCX chooses.

    The RDMA devices ("mlx5_0:1") are let in beside the interface: UCX counts them as network devices, too.

    With `lo` workers read each other's memory through the kernel (cross-memory attach), and shared memory carries the
    rest: both ask for the same user, a TCP port on loopback would not. Without `tcp` UCX listens on no TCP port at all.
    `TransferError` when the user's own UCX_TLS asks for TCP all the same; on `lo` that is left to the user.
    """
    if interface == LOOPBACK:
        os.environ.setdefault("UCX_TLS", WITHOUT_TCP)
        for transport in SHARED_MEMORY:
            os.environ.setdefault(f"UCX_{transport}_ERROR_HANDLING", "y")
    # UCX reads VRAM of another process by copies of CUDA, but only where it has seen NVLink, unless it is told to:
    # between two workers of one GPU there is none, and it would emulate the reads over TCP.
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    if networks := [name for name in (interface, *devices) if name]:
        os.environ["UCX_NET_DEVICES"] = ",".join(networks)
    if ports:
        os.environ["UCX_TCP_PORT_RANGE"] = ports
    if not tcp:
        chosen = os.environ.setdefault("UCX_TLS", WITHOUT_TCP)
        if names_tcp(chosen):
            raise TransferError(
                f"UCX_TLS is {chosen}, so UCX would take KV from anybody over TCP: leave it out or set it to "
                f"{WITHOUT_TCP}, or say kv_allow_unauthenticated_tcp"
            )


def names_tcp(transports: str) -> bool:
    """Whether UCX would use TCP with this UCX_TLS: a list, or after ^ a list of what is left out."""
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    return "tcp" not in names if transports.startswith("^") else bool(names & {"tcp", "all", ""})


class TransportLog:
    """Which transport UCX chose for its newest kind of read. Make it before UCX is loaded, once a process."""

    def __init__(self) -> None:
        self._offset = 0
        self._file: int | None = None
        log_file = os.environ.get("UCX_LOG_FILE", LOG_LINK)
        if log_file.startswith(LOG_LINK):  # not set, or set by the parent process for itself
            self._file = os.memfd_create("ucx-log")
            os.environ["UCX_LOG_FILE"] = f"{LOG_LINK}{self._file}"
            os.environ["UCX_PROTO_INFO"] = "y"

    def newest(self) -> str:
        """ "cma/memory", "tcp/eth0", …; empty when UCX has printed nothing since the last call.

        It prints nothing for a second connection of the same kind. What it prints to a log file of the user's own is
        not seen here.
        """
        if self._file is None:
            return ""
        ctypes.CDLL(None).fflush(None)  # UCX leaves its lines in the C library's buffer
        text = os.pread(self._file, os.fstat(self._file).st_size - self._offset, self._offset)
        self._offset += len(text)
        tables = READ_TABLE.split(text.decode(errors="replace"))[1:]
        rows = [row[1] for row in map(LAST_RANGE.search, tables) if row]
        return rows[-1] if rows else ""
