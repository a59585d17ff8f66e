"""The judge of lost ranks: a worker that has lost one ends, and its routers hear of that."""

from __future__ import annotations

from functools import partial

from tests.simulation.world.network import Network, SimulatedLink
from tests.simulation.world.worker import SimulatedWorker

EXIT_SECONDS = 1.0  # until the process is gone
ROUNDING = 0.1  # seconds


def prove_unlinked_soon(network: Network, worker: SimulatedWorker) -> None:
    """A worker loses a rank now: in the time of its exit and of a silence every router that runs has heard so."""
    seconds = EXIT_SECONDS + network.faults.silence_seconds + ROUNDING
    for link in network.links_of(worker.process):
        link.router.process.after(seconds, partial(_prove_unlinked, network, link, seconds))


def _prove_unlinked(network: Network, link: SimulatedLink, seconds: float) -> None:
    network.count("path a router has heard of a lost rank")
    assert not link.router.up, (
        f"{link.worker.endpoint.hello.uid} lost a rank {seconds:g} s ago, and is linked to "
        f"{link.router.endpoint.hello.uid} still"
    )
