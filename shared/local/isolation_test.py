"""The isolation test of a deployment: what a pod that does not belong to it can connect to.

    python -m shared.local.isolation_test segue-decode:8002,20000-20007 segue-prefill:8002,20000-20007

It runs in a pod without the release's labels, which no NetworkPolicy of the chart admits to a worker. Policies are
objects that any API server stores; whether something enforces them depends on the cluster's network plugin, and this is
the only way to find out. The addresses are those of headless Services' names: the pod has no access to the API.

Every connection must fail, by a refusal or by silence: plugins differ in that. A name that does not resolve proves
nothing and fails the test. That the ports are open to those who may use them is what `smoke_test` proves beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shared.primitives.errors import SmokeTestError

CONNECT_SECONDS_MAX = 3.0
CONNECTIONS_MAX = 64  # at once
ADDRESSES_MAX = 8  # of one name: a network that stops a stranger at eight workers stops it at all of them
SHOWN_MAX = 3

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ClosedPorts:
    """The workers behind one name, and the ports that must be closed to strangers."""

    host: str
    ports: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> ClosedPorts:
        """`HOST:PORT,FIRST-LAST,…`; raises SmokeTestError for other words."""
        host, _, listed = text.rpartition(":")
        try:
            ranges = [[int(end) for end in part.split("-")] for part in listed.split(",")]
        except ValueError:
            ranges = []
        if not host or not ranges:
            raise SmokeTestError(f"expected HOST:PORT,FIRST-LAST,…, got {text!r}")
        return cls(host, tuple(port for part in ranges for port in range(part[0], part[-1] + 1)))


def isolation_test(closed: Sequence[ClosedPorts]) -> list[str]:
    """What was found, one line each. Raises SmokeTestError when something can be reached, or nothing was proven."""
    return asyncio.run(_test(closed))


async def _test(closed: Sequence[ClosedPorts]) -> list[str]:
    found = []
    for each in closed:
        hosts = (await _resolve(each.host))[:ADDRESSES_MAX]
        targets = [(host, port) for host in hosts for port in each.ports]
        limit = asyncio.Semaphore(CONNECTIONS_MAX)
        connected = await asyncio.gather(*(_connects(target, limit) for target in targets))
        open_ones = [target for target, reached in zip(targets, connected, strict=True) if reached]
        if open_ones:
            raise SmokeTestError(_describe(open_ones))
        found.append(
            f"none of {len(targets)} ports of {len(hosts)} pods of {each.host} lets a stranger connect"
        )
    return found


async def _resolve(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SmokeTestError(
            f"{host} has no address ({error}), so nothing was proven: are its pods Ready, and may this pod ask DNS?"
        ) from error
    return sorted({str(address[0]) for *_, address in found})


async def _connects(target: Address, limit: asyncio.Semaphore) -> bool:
    async with limit:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*target), CONNECT_SECONDS_MAX)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


def _describe(reached: Sequence[Address]) -> str:
    shown = ", ".join(f"{host} port {port}" for host, port in reached[:SHOWN_MAX])
    more = f" and {len(reached) - SHOWN_MAX} more" if len(reached) > SHOWN_MAX else ""
    return (
        f"a pod without this release's labels connected to {shown}{more}: the network of this cluster does not enforce "
        "NetworkPolicies. Every pod of the cluster can connect to the workers; where KV moves by NIXL over TCP, it can "
        "read and write their memory. Use a network plugin that enforces NetworkPolicies. If you trust every pod of "
        "this cluster, set networkPolicy.verify to false."
    )


def main() -> None:
    """Print what was found and exit with 0, or print one sentence and exit with 1."""
    try:
        found = isolation_test([ClosedPorts.parse(text) for text in sys.argv[1:]])
    except SmokeTestError as error:
        sys.exit(f"segue isolation test: {error}")
    sys.stdout.writelines(f"{line}\n" for line in found)


if __name__ == "__main__":
    main()
