"""The `segue` command: `up` is the whole deployment on this machine; a role is `python -m ROLE`.

One parser has all commands and their flags, but for those of `up`, which are settings: `local/config.py` reads them.
A failure is one sentence and status 1, never a traceback. That includes Ctrl-C while modules are imported, so
everything heavy is imported inside functions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

    from shared.process.settings import FlagParser

COMMANDS = {
    "up": "serve a language model on this machine, with prefill and decode in processes of their own",
    "serve": "the same as up",
    "run": "write one answer of a model, from a deployment that ends with it",
    "chat": "talk to a router that runs",
    "pull": "fetch or convert a model ahead of time, and say where it lies",
    "models": "list the models that this machine has, with their sizes",
    "doctor": "say what this machine lacks for Segue, or what holds a running deployment back (--live)",
    "keys": "draw API keys for the clients of a router",
}
EPILOG = (
    "MODEL is a folder, a .gguf file, a Hub id, or smollm2, which is installed with Segue. "
    "`segue COMMAND --help` lists the flags of a command."
)
MAX_TOKENS = 1024  # of an answer, unless the user wants more: a small model may not find its end


def main() -> NoReturn:
    """Entry point of the `segue` command."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        run_and_exit(sys.argv[1:])
    except KeyboardInterrupt:
        command = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
        with contextlib.suppress(OSError):  # a reader that has gone
            sys.stdout.flush()
            sys.stderr.write(f"segue {command}".rstrip() + ": interrupted\n")
            sys.stderr.flush()
        os._exit(128 + signal.SIGINT)  # Python would wait for threads, which a library of a download may have
    except BrokenPipeError:  # who read the output has gone, as `head` does once it has its lines
        os._exit(128 + signal.SIGPIPE)  # Python would flush its output once more, and say that it cannot


def run_and_exit(argv: list[str]) -> NoReturn:
    """Carry out the command and exit; where it cannot start, exit with one sentence."""
    from shared.primitives.errors import StartError
    from shared.process.role_main import exit_now, exit_with_error

    try:
        try:
            run(argv)
        except SystemExit as ended:  # a help was printed
            if ended.code:
                raise
        exit_now()
    except StartError as error:
        exit_with_error(f"{argv[0] if argv[0] in COMMANDS else 'command line'}: {error}")


def run(argv: list[str]) -> None:
    """Carry out the command; raises StartError."""
    from shared.primitives.errors import ConfigError
    from shared.process.settings import near_miss

    if argv and argv[0] not in (*COMMANDS, "-h", "--help", "--version"):
        there_are = f"; there are {', '.join(COMMANDS)}: see segue --help"
        raise ConfigError(f"unknown command {argv[0]}{near_miss(argv[0], COMMANDS, there_are)}")
    parser = command_parser()
    flags, words = parser.parse_known_args(argv)
    if flags.command in ("up", "serve"):
        _up(words)
    elif flags.command == "run" and words:
        raise ConfigError("the model comes first: segue run MODEL [PROMPT] [FLAGS]")
    elif words:
        flags.parser.refuse(words[0])
    elif "action" in flags and flags.action is None:
        flags.parser.print_help()
    elif flags.command is None:
        parser.print_help()
    else:
        _carry_out(flags)


def command_parser() -> FlagParser:
    """The parser of all commands. `up` leaves its words to `load_local`, and `--help` among them."""
    from shared.primitives.version import VERSION
    from shared.process.settings import FlagParser

    parser = FlagParser(prog="segue", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"segue {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    of = {
        name: commands.add_parser(name, help=text, description=text, add_help=name not in ("up", "serve"))
        for name, text in COMMANDS.items()
    }
    for each in of.values():
        each.set_defaults(parser=each)

    of["run"].usage = "segue run MODEL [PROMPT] [FLAGS of segue up]"
    of["run"].add_argument("model", metavar="MODEL", help="as segue up takes it")
    prompt = "what the model is asked; without it: a conversation, as segue chat has it"
    of["run"].add_argument("words", metavar="PROMPT", nargs="...", help=prompt).required = False

    of["chat"].epilog = (
        "Ctrl-C ends an answer, and at the prompt the conversation; so do /exit and Ctrl-D. /help lists the commands. "
        "The key is read from SEGUE_API_KEY, so that no list of processes shows it."
    )
    router = of["chat"].add_argument_group("router")
    router.add_argument("--url", default="http://127.0.0.1:8000", help="where it listens (%(default)s)")
    router.add_argument("--model", default="", help="the model's name, where the router serves several")
    answers = of["chat"].add_argument_group("answers")
    answers.add_argument("--system", default="", help="what the model is told first")
    temperature = "0 is greedy; else as the model's folder says, or 1"
    answers.add_argument("--temperature", type=float, help=temperature)
    answers.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of each answer (%(default)s)")

    of["pull"].epilog = "`segue up MODEL` then needs no network."
    of["pull"].add_argument("model", metavar="MODEL", help="a Hub id, a .gguf file or smollm2")

    of["doctor"].add_argument("model", nargs="?", default="", help="a model that shall fit into memory")
    of["doctor"].add_argument("--port", type=int, default=8000, help="the port that shall be free")
    live = "name the bottleneck of the deployment whose admin ports these are: a router's, better with its workers'"
    of["doctor"].add_argument("--live", nargs="+", metavar="URL", default=[], help=live)
    of["doctor"].add_argument("--json", action="store_true", help="write what is found as JSON")

    actions = of["keys"].add_subparsers(title="actions", metavar="ACTION", dest="action")
    new = actions.add_parser("new", help="draw a key for a client, and show it once with its line")
    new.description = (
        "Draws an API key for a client and shows it once, with the line that a router's file of keys gets. A second "
        "key of the same name replaces the first as soon as the old line is deleted."
    )
    new.add_argument("name", metavar="NAME", help="the client's, in metrics and logs")
    limits = "rpm=N, tpm=N, concurrent=N, priority=N, ttft_target=SECONDS or models=A,B"
    new.add_argument("limits", metavar="LIMIT", nargs="*", default=[], help=limits)
    new.add_argument("--file", help="append the line to this file")
    check = actions.add_parser("check", help="say whether a router would take a file, and whose keys it has")
    check.add_argument("file", metavar="FILE")
    for each in (new, check):
        each.set_defaults(parser=each)
    return parser


def _carry_out(flags: argparse.Namespace) -> None:
    """Carry out a command whose flags are right; only its own modules are loaded."""
    match flags.command:
        case "run":
            from shared.local.chat_command import run_once

            run_once(flags.model, flags.words)
        case "chat":
            from shared.local.chat_command import chat

            options = {"max_tokens": flags.max_tokens, "temperature": flags.temperature}
            chat(flags.url, flags.model, flags.system, {k: v for k, v in options.items() if v is not None})
        case "pull":
            from shared.local.model_store import pull

            pull(flags.model)
        case "models":
            from shared.local.model_store import models

            models()
        case "doctor" if flags.live:
            from shared.local.live_doctor import live_doctor

            live_doctor(flags.live, as_json=flags.json)
        case "doctor":
            from shared.local.doctor_command import doctor

            doctor(flags.model, flags.port, as_json=flags.json)
        case "keys":
            from pathlib import Path

            from shared.local.keys_command import check, new

            if flags.action == "new":
                new(flags.name, flags.limits, Path(flags.file) if flags.file else None)
            else:
                check(Path(flags.file))


def _up(words: list[str]) -> None:
    from shared.local.config import load_local
    from shared.local.console import StartupConsole
    from shared.local.up import up

    up(load_local(words, os.environ), StartupConsole())


if __name__ == "__main__":
    main()
