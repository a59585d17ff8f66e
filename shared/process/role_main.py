"""How the process of a role starts and ends: settings, logs, the lifeline to its parent, one sentence on failure.

`python -m router|prefill|decode` calls `first_signals`, then `run_role`, and nothing else. This file does not know what
a role does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import structlog

from shared.primitives.errors import ConfigError, StartError
from shared.process.logs import configure, describe_failure, flush
from shared.process.process_config import ProcessConfig
from shared.process.settings import load, unknown_variables
from shared.wire.messages import Role

Config = TypeVar("Config", bound=ProcessConfig)
DESCRIPTORS_LOW = 4096  # a router of 600 workers holds 2,400, and one for each client
# Objects of a worker that are made and not freed until the next look at them; Python's own is 700. What a scheduler
# gives up ends with its last reference. At a router it may not: a refused request or a closed connection can leave a
# cycle with a prompt in it, and is found early.
YOUNG_OBJECTS_OF_WORKER = 50_000

log = structlog.get_logger(__name__)


def run_role(role: Role, struct: type[Config], serve: Callable[[Config], None]) -> NoReturn:
    """Run `serve` with this process's settings, then exit: 0 when it returns, 1 with one sentence on StartError.

    Any other error is a fault of Segue or of a library. It ends the process with one log line and status 1, whatever
    threads still run: a process without its main thread would look alive and do nothing.

    `serve` imports heavy modules (torch, nixl, transformers) itself, so that `--help` and a wrong flag answer at once.
    Until it handles signals, they end the process (`first_signals`).
    """
    try:
        config = load(struct, sys.argv[1:], os.environ)
        refuse_slow_heartbeats(config)
        if config.lifeline_fd >= 0:
            hold_lifeline(config.lifeline_fd)
        before, limit = raise_descriptor_limit()
        forbid_core_dumps()
        configure(config.log_level, config.log_format, role=role, uid=config.uid)
        if role == "router" and limit < DESCRIPTORS_LOW:
            log.warning("process.few_descriptors", limit=limit, before=before)
        for variable in unknown_variables(struct, os.environ):
            log.warning("settings.unknown_variable", variable=variable)
        serve(config)
    except StartError as error:
        exit_with_error(f"{role}: {error}")
    except Exception as error:
        log.critical("process.failed", **describe_failure(error))
        exit_now(status=1)
    exit_now()


def refuse_slow_heartbeats(config: ProcessConfig) -> None:
    """Raises ConfigError where links would break between two heartbeats."""
    if config.heartbeat_seconds >= config.silence_seconds:
        raise ConfigError(
            f"heartbeat_seconds is {config.heartbeat_seconds:g} and silence_seconds {config.silence_seconds:g}, "
            "so each peer would count as lost before its next heartbeat: keep heartbeat_seconds at a third of it"
        )


def exit_now(status: int = 0) -> NoReturn:
    """Exit after everything has been closed. To tear down all modules would take up to a second."""
    flush()
    with contextlib.suppress(OSError):  # a reader that has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def exit_with_error(sentence: str) -> NoReturn:
    """Write one line to stderr, behind what was logged, and exit with status 1."""
    flush()
    sys.stderr.write(f"segue {' '.join(sentence.split())}\n")
    sys.exit(1)


def raise_descriptor_limit() -> tuple[int, int]:
    """Allow this process as many open descriptors as it may have; many systems start it with 1,024.

    A router needs about four a worker and one a client, a worker one a peer and one a router. Returns the limit before
    and the limit now.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a limit that the system does not grant stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return before, limit


def forbid_core_dumps() -> None:
    """Let the kernel keep no image of this process when it crashes: keys and prompts would be in it.

    One byte, since with a limit of 0 the kernel still hands the image to a program, where `core_pattern` names one.
    Workers stay dumpable (PR_SET_DUMPABLE): UCX reads pages of a neighbour's memory, and the kernel asks that of it.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    if most != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def hold_lifeline(descriptor: int) -> None:
    """End this process when the other end of the pipe `descriptor` is closed, however its holder ended.

    The holder never writes. If it ended before this process started, the pipe is at its end already. The process then
    exits without closing its links, since the whole deployment ends.
    """

    def wait_for_the_end() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def spare_what_is_loaded(young_objects: int = 0) -> None:
    """Keep Python's garbage collector off what is loaded. Call once, when all is that lives as long as the process.

    A full collection would look at all of it again: 0.1 s in a worker, whose device waits meanwhile. `young_objects`:
    how many are made until the next look at them; 0: Python's own threshold.
    """
    gc.collect()
    gc.freeze()
    if young_objects:
        _, *older = gc.get_threshold()
        gc.set_threshold(young_objects, *older)
