"""`segue chat`: a conversation at the terminal with a router that runs.

    segue chat [--url http://127.0.0.1:8000] [--model NAME] [--system TEXT] [--temperature T] [--max-tokens N]

Answers are written as they come. Ctrl-C ends an answer, and at the prompt the conversation; so do /exit and Ctrl-D.
/clear forgets what was said. The key is read from SEGUE_API_KEY, so that no list of processes shows it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shared.errors import StartError
from shared.local.chat_session import ChatSession
from shared.process.settings import FlagParser

PROMPT = "> "
MAX_TOKENS = 1024  # of an answer, unless the user wants more: a small model may not find its end


def chat(words: Sequence[str]) -> None:
    """Talk until the user ends it. Raises StartError where no router answers, ConfigError for wrong flags."""
    parser = FlagParser(prog="segue chat", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the router listens")
    parser.add_argument("--model", default="", help="the model's name, where the router serves several")
    parser.add_argument("--system", default="", help="what the model is told first")
    parser.add_argument(
        "--temperature", type=float, help="0 is greedy; else as the model's folder says, or 1"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of each answer (%(default)s)")
    flags = parser.parse_args(words)
    talk(
        ChatSession(
            flags.url,
            os.environ.get("SEGUE_API_KEY", ""),
            flags.model,
            system=flags.system,
            options={"max_tokens": flags.max_tokens}
            | ({} if flags.temperature is None else {"temperature": flags.temperature}),
        )
    )


def talk(conversation: ChatSession) -> None:
    """Prompts and answers, until the user ends it."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` a line editor and a history
    sys.stdout.write(f"{conversation.model}: /clear forgets, /exit or Ctrl-D ends\n")
    while (text := _next_line()) not in (None, "/exit"):
        if text == "/clear":
            conversation.turns.clear()
        elif text and text.startswith("/") and " " not in text:
            sys.stderr.write(f"segue chat: there is no {text[:64]}; there are /clear and /exit\n")
        elif text:
            _say(conversation, text)


def write_answer(conversation: ChatSession, text: str) -> None:
    """Write the answer as it comes, and end its line. Raises StartError."""
    try:
        for piece in conversation.answer(text):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _say(conversation: ChatSession, text: str) -> None:
    """One turn; what goes wrong in it is a sentence, and the conversation goes on."""
    try:
        write_answer(conversation, text)
    except StartError as error:
        sys.stderr.write(f"segue chat: {error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("segue chat: the answer was ended; it is no part of the conversation\n")


def _next_line() -> str | None:
    """What the user types; None: that was all."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n" if sys.stdin.isatty() else "")
        return None
