"""How each role's process begins and ends: settings, logs, the lifeline to its parent, one sentence on failure.

`python -m router|prefill|decode` calls `enter` and nothing else. What the process then does is its own business.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import structlog

from shared.errors import StartError
from shared.messages import Role
from shared.process.logs import configure
from shared.process.settings import ProcessConfig, load, unknown_variables

Config = TypeVar("Config", bound=ProcessConfig)
log = structlog.get_logger(__name__)


def enter(role: Role, struct: type[Config], serve: Callable[[Config], None]) -> NoReturn:
    """Run `serve` with this process's settings and leave: 0 when it returns, 1 with one sentence on StartError.

    `serve` should import what is heavy (torch, nixl, transformers) itself: `--help` and a wrong flag answer at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # until the process serves, and can say goodbye
        signal.signal(number, _end_by_signal if os.getpid() == 1 else signal.SIG_DFL)
    try:
        config = load(struct, sys.argv[1:], os.environ)
        if config.lifeline_fd >= 0:
            hold_lifeline(config.lifeline_fd)
        configure(config.log_level, config.log_format, role=role, uid=config.uid)
        for variable in unknown_variables(struct, os.environ):
            log.warning("unknown variable", variable=variable)
        serve(config)
    except StartError as error:
        leave_with_sentence(f"{role}: {error}")
    _leave_at_once()


def _end_by_signal(number: int, _: object) -> NoReturn:
    """For process 1 of a container, which no default ends; Python calls this only between two of its own steps."""
    os._exit(128 + number)


def _leave_at_once() -> NoReturn:
    """Exit with status 0 once everything is closed; to take torch apart module by module would take a second."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_with_sentence(sentence: str) -> NoReturn:
    """Write one line to stderr and exit with status 1."""
    sys.stderr.write(f"segue {' '.join(sentence.split())}\n")
    sys.exit(1)


def hold_lifeline(descriptor: int) -> None:
    """End this process when the other end of the pipe `descriptor` is closed, however its holder ended.

    The holder never writes; when it has gone before we came, the pipe is at its end already. An end means that nobody
    is left to hear a goodbye, so there is none.
    """

    def wait_for_the_end() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()
