"""What a running deployment shows of its workers and requests, as tests of faults ask for it."""

from __future__ import annotations

from contextlib import suppress

import httpx2

from tests.integration.deployments.deployment import LocalDeployment, RunningProcess
from tests.waiting import until


def busy_worker(running: LocalDeployment, role: str) -> RunningProcess:
    """The worker of this role that holds the most requests now, once there is one that holds any."""
    used: dict[str, float] = {}
    workers: list[RunningProcess] = []

    def look() -> bool:
        workers[:] = running.processes(role)
        used.clear()
        for worker in workers:
            with suppress(httpx2.TransportError):  # one that has just started answers nothing yet
                used[worker.uid] = running.metrics(worker).get("segue_slots_used", 0.0)
        return any(used.values())

    until(look, 60, f"a busy {role} worker")
    return max(workers, key=lambda p: used.get(p.uid, 0.0))


def continuations(running: LocalDeployment) -> float:
    """Attempts after the first, for whatever cause."""
    router = running.processes("router")[0]
    return sum(v for n, v in running.metrics(router).items() if n.startswith("segue_continuations_total"))


def linked_workers(running: LocalDeployment) -> float:
    """Workers that are up, as the router sees it."""
    router = running.processes("router")[0]
    return sum(v for n, v in running.metrics(router).items() if n.startswith("segue_workers{"))
