"""The `segue` command: `up` is the whole deployment on this machine, `bench` measures one; a role is `python -m ROLE`.

Whatever is wrong is answered with one sentence and status 1, never with a traceback; also Ctrl-C while the rest is
imported, which is why all of it is imported late.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

USAGE = """usage: segue up [--model MODEL] [--prefill N] [--decode N] [--router-port PORT] …
       segue bench [--url URL] [--scenarios NAME,…] [--runs N] [--json FILE] …

up: serve a language model on this machine, with prefill and decode in processes of their own.
bench: measure a server of OpenAI's API, this one or any other.
`segue up --help` and `segue bench --help` list all flags; `segue --version` says the version.
"""


def main() -> NoReturn:
    """Entry point of the `segue` command."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        run_or_leave(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write(f"segue {_word(sys.argv[1:])}: interrupted\n")
        sys.exit(130)
    sys.exit(0)


def run_or_leave(argv: list[str]) -> None:
    """Carry out the command; where it cannot start, leave with one sentence."""
    from shared.entry import leave_with_sentence
    from shared.errors import BenchError, StartError

    try:
        run(argv)
    except (BenchError, StartError) as error:
        leave_with_sentence(f"{_word(argv)}: {error}")


def run(argv: list[str]) -> None:
    """Carry out the command; raises StartError."""
    from importlib.metadata import version

    from shared.config import load
    from shared.errors import ConfigError

    match argv:
        case [] | ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case ["--version"]:
            sys.stdout.write(f"segue {version('segue')}\n")
        case ["up", *flags]:
            from shared.local import LocalConfig, up
            from shared.narration import Narration

            up(load(LocalConfig, flags, os.environ), Narration())
        case ["bench", *flags]:
            _bench(flags)
        case [word, *_]:
            raise ConfigError(
                f"unknown command {word}; there are `segue up` and `segue bench`, see segue --help"
            )


def _bench(flags: list[str]) -> None:
    from rich.console import Console

    from shared.bench.config import BenchConfig
    from shared.config import load
    from shared.errors import BenchError

    config = load(BenchConfig, flags, {})  # no variables: SEGUE_MODEL is a path of the server's
    try:
        from shared.bench.measuring import bench
    except ModuleNotFoundError as error:
        raise BenchError(f"{error.name} is not installed: pip install 'segue[bench]'") from None

    bench(config, Console(highlight=False, soft_wrap=True, markup=False))


def _word(argv: list[str]) -> str:
    """The command, for the beginning of a sentence."""
    return "bench" if argv[:1] == ["bench"] else "up"
