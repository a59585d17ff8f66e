"""The `segue` command: `up` is the whole deployment on this machine; a role is `python -m ROLE`.

A failure is one sentence and status 1, never a traceback. That includes Ctrl-C while modules are imported, so
everything heavy is imported inside functions.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

USAGE = """usage: segue up [MODEL] [-p PORT] [--prefill N] [--decode N] [--config FILE] …

       segue keys new NAME | check FILE

up, serve: serve a language model on this machine, with prefill and decode in processes of their own. MODEL is a folder,
a .gguf file, a Hub id, or smollm2, which is installed with Segue.
keys: draw API keys for the clients of a router.
`segue up --help` lists all flags; `segue --version` says the version.
"""
COMMANDS = ("up", "serve", "keys")


def main() -> NoReturn:
    """Entry point of the `segue` command."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        run_and_exit(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("segue up: interrupted\n")
        sys.exit(130)


def run_and_exit(argv: list[str]) -> NoReturn:
    """Carry out the command and exit; where it cannot start, exit with one sentence."""
    from shared.errors import StartError
    from shared.process.role_main import exit_now, exit_with_error

    try:
        run(argv)
        exit_now()
    except StartError as error:
        exit_with_error(f"{argv[0] if argv[0] in COMMANDS else 'command line'}: {error}")


def run(argv: list[str]) -> None:
    """Carry out the command; raises StartError."""
    from importlib.metadata import version

    from shared.errors import ConfigError

    match argv:
        case [] | ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case ["--version"]:
            sys.stdout.write(f"segue {version('segue')}\n")
        case ["up" | "serve", *words]:
            from shared.local.config import load_local
            from shared.local.console import StartupConsole
            from shared.local.spelling import spelled_out
            from shared.local.up import up

            up(load_local(spelled_out(words), os.environ), StartupConsole())
        case ["keys", *words]:
            from shared.local.keys_command import keys

            sys.stdout.write(keys(words))
        case [word, *_]:
            raise ConfigError(
                f"unknown command {word}; there are `segue up MODEL` and `segue keys`, see segue --help"
            )
