"""The `segue` command: `up` is the whole deployment on this machine; a role is `python -m ROLE`.

A failure is one sentence and status 1, never a traceback. That includes Ctrl-C while modules are imported, so
everything heavy is imported inside functions.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

USAGE = """usage: segue up [MODEL] [-p PORT] [--prefill N] [--decode N] [--config FILE] …
       segue run MODEL [PROMPT]
       segue chat [--url URL]
       segue pull MODEL
       segue models
       segue doctor [MODEL] [--json]
       segue keys new NAME | check FILE

up, serve: serve a language model on this machine, with prefill and decode in processes of their own. MODEL is a folder,
a .gguf file, a Hub id, or smollm2, which is installed with Segue.
run: one answer of a model, from a deployment that ends with it.
chat: talk to a router that runs.
pull, models: fetch a model ahead of time; list those that are here.
doctor: say what this machine lacks for Segue.
keys: draw API keys for the clients of a router.
`segue up --help` lists all flags; `segue --version` says the version.
"""
COMMANDS = ("up", "serve", "run", "chat", "pull", "models", "doctor", "keys")


def main() -> NoReturn:
    """Entry point of the `segue` command."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        run_and_exit(sys.argv[1:])
    except KeyboardInterrupt:
        command = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
        sys.stderr.write(f"segue {command}".rstrip() + ": interrupted\n")
        sys.exit(130)


def run_and_exit(argv: list[str]) -> NoReturn:
    """Carry out the command and exit; where it cannot start, exit with one sentence."""
    from shared.primitives.errors import StartError
    from shared.process.role_main import exit_now, exit_with_error

    try:
        run(argv)
        exit_now()
    except StartError as error:
        exit_with_error(f"{argv[0] if argv[0] in COMMANDS else 'command line'}: {error}")


def run(argv: list[str]) -> None:
    """Carry out the command; raises StartError."""
    from importlib.metadata import version

    match argv:
        case [] | ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case ["--version"]:
            sys.stdout.write(f"segue {version('segue')}\n")
        case [word, *words]:
            _command(word)(words)


def _command(word: str) -> Callable[[list[str]], None]:
    """What carries out this command; only its own modules are loaded. Raises ConfigError where there is none."""
    match word:
        case "up" | "serve":
            return _up
        case "run":
            from shared.local.run_command import run_once

            return run_once
        case "chat":
            from shared.local.chat_command import chat

            return chat
        case "pull" | "models":
            from shared.local import models_command

            return models_command.pull if word == "pull" else models_command.models
        case "doctor":
            from shared.local.doctor_command import doctor

            return doctor
        case "keys":
            from shared.local.keys_command import keys

            return keys
    from shared.primitives.errors import ConfigError

    raise ConfigError(f"unknown command {word}; there are {', '.join(COMMANDS)}: see segue --help")


def _up(words: list[str]) -> None:
    from shared.local.config import load_local
    from shared.local.console import StartupConsole
    from shared.local.spelling import spelled_out
    from shared.local.up import up

    up(load_local(spelled_out(words), os.environ), StartupConsole())


if __name__ == "__main__":
    main()
