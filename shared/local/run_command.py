"""`segue run MODEL PROMPT`: one answer of a model, from a deployment of its own that ends with it.

    segue run smollm2 "Why is the sky blue?" [flags of segue up]

The answer goes to stdout, everything else to stderr. Without a prompt it is a conversation, as `segue chat` has it.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from shared.local.chat_command import talk, write_answer
from shared.local.chat_session import ChatSession
from shared.primitives.errors import StartError

_SERVED = re.compile(r".* is served at (http://\S+)/v1,")
END_SECONDS_MAX = 10.0


def run_once(model: str, words: Sequence[str]) -> None:
    """Carry out the command; `words` are the prompt, if any, and flags of `segue up`. Raises StartError."""
    prompt, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    key = secrets.token_urlsafe(16)  # nobody else on this machine is served meanwhile
    up = [sys.executable, "-P", "-m", "shared.local.cli", "up", model, "-p", "0", *rest]
    with subprocess.Popen(
        up,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SEGUE_API_KEY": key},
        process_group=0,
    ) as child:
        assert child.stdout is not None
        try:
            conversation = ChatSession(_url(child.stdout), key)
            threading.Thread(target=_pass_on, args=(child.stdout,), daemon=True).start()
            if prompt is None:
                talk(conversation)
            else:
                write_answer(conversation, prompt)
        finally:
            _end(child)


def _url(lines: IO[str]) -> str:
    """Where the deployment listens, once it is ready. Raises StartError if it ends before; it has said why."""
    url = ""
    for line in lines:
        if found := _SERVED.match(line):
            url = found.group(1)
        if line.startswith("ready in "):
            return url
        if not (found or url or line.startswith("each admin port")):  # nobody else is served
            sys.stderr.write(line)
    raise StartError("the model could not be started: the reason is above")


def _pass_on(lines: IO[str]) -> None:
    for line in lines:
        sys.stderr.write(line)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
