"""A deployment of processes that load nothing: the real restarts, pipes and signals, without a model.

    python -m tests.integration.deployments.small_deployment CHILD…        the parent, one child for each word
    python -m tests.integration.deployments.small_deployment --child …     what the parent starts

A child is `steady` (serves until a signal), `stubborn` (ignores signals), `busy` (loads, and answers no probe; SIGTERM
would make it drain), `hanging` (is ready, and then its loop turns no more), `wordy` (writes much before it is ready) or
`broken` (cannot start).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from queue import SimpleQueue

from shared.local.children import GRACE_SECONDS, HOST, Child, ChildProcesses, Liveness
from shared.local.console import Service, StartupConsole
from shared.primitives.errors import StartError
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.metrics import Metrics
from shared.process.role_main import exit_with_error, hold_lifeline

NOWHERE = Service("nowhere", "nowhere", "nothing", has_key=False)
MODULE = "tests.integration.deployments.small_deployment"


def be_child(kind: str, port: int, lifeline: int) -> None:
    """Serve probes until SIGINT or SIGTERM."""
    hold_lifeline(lifeline)
    if kind == "wordy":
        sys.stderr.write("a line of a log\n" * (1 << 16))  # more than a pipe holds
    if kind == "broken":
        exit_with_error(f"{MODULE}: the flux capacitor is missing")
    stop = SimpleQueue[int]()  # a handler may put into it, whatever the thread holds that it interrupts
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if kind == "stubborn" else lambda number, _: stop.put(number))
    if kind == "busy":
        be_busy(port, stop)
        return
    health = Health(loop_seconds_max=1.0 if kind == "hanging" else 60.0)
    health.facts = {"pid": os.getpid()}
    health.beat()
    health.become_ready()
    admin = AdminPort(HOST, port, probe_pages(health, Metrics("decode")))
    stop.get()
    admin.close()


def be_busy(port: int, stop: SimpleQueue[int]) -> None:
    """Accept connections, answer none, and end by SIGINT alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.create_server((HOST, port)):
        sys.stderr.write("listening\n")
        sys.stderr.flush()
        stop.get()


def be_parent(kinds: list[str], grace_seconds: float) -> None:
    """Run the deployment until a signal."""
    holders = [socket.socket() for _ in kinds]
    children = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for number, (kind, holder) in enumerate(zip(kinds, holders, strict=True)):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        port = holder.getsockname()[1]
        children.append(
            Child(f"{kind}-{number}", MODULE, port, ["--child", kind, "--port", str(port)], environment)
        )
    try:
        liveness = Liveness(period_seconds=0.2)
        ChildProcesses(children, StartupConsole(), NOWHERE, liveness, grace_seconds=grace_seconds).run()
    except StartError as error:
        exit_with_error(f"up: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--child", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--grace-seconds", type=float, default=GRACE_SECONDS)
    parser.add_argument("--lifeline-fd", type=int, default=-1)
    parser.add_argument("kinds", nargs="*")
    arguments = parser.parse_args()
    if arguments.child:
        be_child(arguments.child, arguments.port, arguments.lifeline_fd)
    else:
        be_parent(arguments.kinds, arguments.grace_seconds)


if __name__ == "__main__":
    main()
