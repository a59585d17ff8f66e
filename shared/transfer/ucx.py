"""UCX's settings: where the KV plane may listen. UCX takes them from the environment, once, at its first use.

A variable that whoever runs the process has set by hand stays, but for those two that keep the KV plane where
the network policy expects it: UCX neither authenticates nor encrypts.
"""

from __future__ import annotations

import os


def configure_ucx(interface: str, ports: str) -> None:
    """Confine UCX to a network interface ("lo") and a range of TCP ports ("20000-20999"); empty: as it likes.

    With `lo` only processes of this machine can connect; they read each other's memory through the kernel
    (cross-memory attach), TCP carries what remains.
    """
    if interface:
        os.environ["UCX_NET_DEVICES"] = interface
    if ports:
        os.environ["UCX_TCP_PORT_RANGE"] = ports
