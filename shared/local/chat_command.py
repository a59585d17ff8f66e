"""`segue chat`: a conversation at the terminal with a router that runs.

    segue chat [--url http://127.0.0.1:8000] [--model NAME] [--system TEXT] [--temperature T] [--max-tokens N]

Answers are written as they come. Ctrl-C ends an answer, and at the prompt the conversation; so do /exit and Ctrl-D.
/help lists the commands. A pasted text is one prompt, however many lines it has; typed lines are one prompt between
lines with three quotation marks. The key is read from SEGUE_API_KEY, so that no list of processes shows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from shared.local.answer_lines import AnswerLines
from shared.local.chat_session import ChatSession
from shared.primitives.errors import StartError

PROMPT = "> "
PROMPT_WITHIN = ". "  # within a text of several lines
QUOTES = '"""'
HELP = f"""\
/system TEXT  tells the model something first, from now on; /system alone takes it back
/clear        forgets what was said
/help         shows this
/exit         ends the conversation, as Ctrl-D does; Ctrl-C ends an answer
{QUOTES}           begins a text of several lines, and ends it
"""


def chat(url: str, model: str, system: str, options: Mapping[str, Any]) -> None:
    """Talk until the user ends it. Raises StartError where no router answers. `options`: fields of each request."""
    talk(ChatSession(url, os.environ.get("SEGUE_API_KEY", ""), model, system=system, options=options))


def talk(conversation: ChatSession) -> None:
    """Prompts and answers, until the user ends it."""
    if sys.stdin.isatty():
        import readline  # gives `input` a line editor and a history

        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    sys.stdout.write(f"{conversation.model}: /help lists the commands, /exit or Ctrl-D ends\n")
    while (text := _next_prompt()) not in (None, "/exit"):
        if text and text.startswith("/") and "\n" not in text:
            _obey(conversation, text)
        elif text:
            _say(conversation, text)


def write_answer(conversation: ChatSession, text: str) -> None:
    """Write the answer as it comes, and end its line; thoughts are shown at a terminal alone. Raises StartError."""
    lines = AnswerLines(sys.stdout)
    try:
        for piece in conversation.answer(text):
            lines.write(piece)
    finally:
        lines.end()


def _obey(conversation: ChatSession, text: str) -> None:
    """Carry out a command of the conversation; a word that is none is no prompt either, for it was probably a slip."""
    match text.split(maxsplit=1):
        case ["/help" | "/?"]:
            sys.stdout.write(HELP)
        case ["/clear"]:
            conversation.turns.clear()
        case ["/system", *rest]:
            conversation.system = "".join(rest)
        case ["/exit" | "/help" | "/clear" as name, *_]:
            sys.stderr.write(f"segue chat: {name} takes no words after it\n")
        case [name] if "/" not in name[1:]:
            sys.stderr.write(f"segue chat: there is no {name[:64]}; /help lists what there is\n")
        case _:  # a path, or a sentence that begins with one
            _say(conversation, text)


def _say(conversation: ChatSession, text: str) -> None:
    """One turn; what goes wrong in it is a sentence, and the conversation goes on."""
    try:
        write_answer(conversation, text)
    except StartError as error:
        sys.stderr.write(f"segue chat: {error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("segue chat: the answer was ended; it is no part of the conversation\n")


def _next_prompt() -> str | None:
    """What the user says: a line, or lines between three quotation marks. None: that was all."""
    text = _next_line(PROMPT)
    if text is None or not text.startswith(QUOTES):
        return text
    lines = [text.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = _next_line(PROMPT_WITHIN)
        if line is None:
            return None
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


def _next_line(prompt: str) -> str | None:
    """What the user types or pastes, up to Enter. None: that was all."""
    try:
        return input(prompt if sys.stdin.isatty() else "").strip("\r\n ")
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n" if sys.stdin.isatty() else "")
        return None
