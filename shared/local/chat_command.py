"""`segue chat`: a conversation at the terminal with a router that runs; and `segue run`, with one of its own.

    segue chat [--url http://127.0.0.1:8000] [--model NAME] [--system TEXT] [--temperature T] [--max-tokens N]

Answers are written as they come. Ctrl-C ends an answer, and at the prompt the conversation; so do /exit and Ctrl-D.
/help lists the commands. A pasted text is one prompt, however many lines it has; typed lines are one prompt between
lines with three quotation marks. The key is read from SEGUE_API_KEY, so that no list of processes shows it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, TextIO
from unicodedata import east_asian_width
from urllib.parse import SplitResult, urlsplit

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


# ---- `segue run MODEL PROMPT`: one answer of a model, from a deployment of its own that ends with it -----------------
#     segue run smollm2 "Why is the sky blue?" [flags of segue up]
#
# The answer goes to stdout, everything else to stderr. Without a prompt it is a conversation, as `segue chat` has it.


_SERVED = re.compile(r".* is served at (https?://\S+)/v1,")
END_SECONDS_MAX = 10.0


def run_once(model: str, words: Sequence[str]) -> None:
    """Carry out the command; `words` are the prompt, if any, and flags of `segue up`. Raises StartError."""
    prompt, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    key = secrets.token_urlsafe(16)  # nobody else on this machine is served meanwhile
    # The deployment has a group of its own, for Ctrl-C ends an answer alone. So a terminal that is closed sends it no
    # signal, either: it ends since the kernel closes the held end of its lifeline with this process.
    lifeline, held_end = os.pipe()
    command = [sys.executable, "-P", "-m", "shared.local.held_command", str(lifeline)]
    with subprocess.Popen(
        [*command, "up", model, "-p", "0", *rest],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SEGUE_API_KEY": key},
        process_group=0,
        pass_fds=[lifeline],
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
            os.close(lifeline)
            os.close(held_end)


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


# ---- an answer is written to the terminal as it comes: lines broken between words, thoughts dimmed and apart ---------
# A word may come in several pieces, so a line is broken by going back: what was written of the word is erased and
# written again on the next line, as Ollama's command does. Where the output is no terminal, the answer alone is
# written.


DIM, PLAIN = "\033[2m", "\033[0m"


class AnswerLines:
    """One answer. `end` is called however it ended."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._columns = shutil.get_terminal_size().columns if output.isatty() else 0  # 0: no terminal
        self._column = 0
        self._word = ""  # the last of the line, which may go on
        self._thinking = False

    def write(self, piece: AnswerPiece) -> None:
        """Write what came."""
        if not self._columns:
            self._output.write("" if piece.thought else piece.text)
        else:
            self._turn(piece.thought)
            for character in piece.text:
                self._put(character)
        self._output.flush()

    def end(self) -> None:
        """End the line, and what was dimmed."""
        self._output.write((PLAIN if self._thinking else "") + "\n")
        self._output.flush()

    def _turn(self, thought: bool) -> None:
        """Between thoughts and answer comes an empty line."""
        if thought == self._thinking:
            return
        self._thinking = thought
        self._output.write(DIM if thought else PLAIN + "\n\n")
        self._column, self._word = 0, ""

    def _put(self, character: str) -> None:
        width = _columns(character)
        full = self._column + width >= self._columns
        if character == "\n" or (full and character == " "):
            self._output.write("\n")
            self._column, self._word = 0, ""
            return
        if full:
            self._break()
        self._word = "" if character == " " else self._word + character
        self._column += width
        self._output.write(character)

    def _break(self) -> None:
        """Go on in the next line, with the word that was begun; a word of a whole line is cut."""
        width = sum(map(_columns, self._word))
        if width >= self._column:
            width, self._word = 0, ""
        self._output.write(f"\033[{width}D\033[K\n{self._word}" if width else "\n")
        self._column = width


def _columns(character: str) -> int:
    """How many columns a terminal gives a character."""
    return 2 if east_asian_width(character) in "WF" else 1


# ---- a conversation with a router over HTTP: turns go out, text comes back while it is generated ---------------------
# The standard library is enough, so that whoever has the command has this, too: no package of a role is needed.


ANSWER_SECONDS_MAX = 600.0  # without a byte
CONNECT_SECONDS_MAX = 10.0
ERROR_BYTES_READ = 65_536
NO_ROOM = "context_length_exceeded"


class AnswerPiece(NamedTuple):
    """A part of an answer as it comes; a thought is what the model says to itself before it answers."""

    text: str
    thought: bool = False


class NoRoomError(StartError):
    """What was said, or the answer that is asked for, is longer than the model's context."""


class ChatSession:
    """The turns so far, and where they go. One answer at a time."""

    def __init__(
        self,
        url: str,
        key: str = "",
        model: str = "",
        *,
        system: str = "",
        options: Mapping[str, Any] | None = None,
    ):
        """`options`: fields of each request, such as max_tokens."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
            raise StartError(f"{url} is no URL of a router; expected one like http://127.0.0.1:8000")
        self._url = url
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self.turns: list[dict[str, str]] = []
        self.system = system
        self._options = options or {}
        self.model = model or self._only_model()

    def answer(self, text: str) -> Generator[AnswerPiece, None, None]:
        """Say something: the pieces of the answer, thoughts first.

        What was not answered to its end is no part of the conversation.
        Raises StartError, one sentence, where there is no answer, or none to its end.
        """
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, asked]
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        answered = ""
        for chunk in self._chunks(body):
            if "error" in chunk:
                raise StartError(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if thought := delta.get("reasoning_content"):
                    yield AnswerPiece(thought, thought=True)
                if piece := delta.get("content"):
                    answered += piece
                    yield AnswerPiece(piece)
        self.turns += [asked, {"role": "assistant", "content": answered}]

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer, of all that the context leaves where `max_tokens` is more than that."""
        try:
            yield from self._events("POST", "/chat/completions", json.dumps(body).encode())
        except NoRoomError:
            if "max_tokens" not in body:
                raise
            unbounded = {name: value for name, value in body.items() if name != "max_tokens"}
            yield from self._events("POST", "/chat/completions", json.dumps(unbounded).encode())

    def _only_model(self) -> str:
        """The name of the model, the first where it has several."""
        with self._request("GET", "/models", None) as answer:
            listed = json.loads(answer.read())["data"]
        models = {str(entry.get("root") or entry["id"]): str(entry["id"]) for entry in reversed(listed)}
        if len(models) != 1:
            raise StartError(f"{self._url} serves {len(models)} models; name one with --model")
        return models.popitem()[1]

    def _events(self, method: str, path: str, body: bytes) -> Iterator[dict[str, Any]]:
        """The chunks of a stream. Raises StartError unless it comes to `[DONE]`."""
        with self._request(method, path, body) as answer:
            for line in answer:
                word, _, data = line.decode("utf-8", "replace").rstrip("\r\n").partition(": ")
                if word == "data" and data == "[DONE]":
                    return
                if word == "data":
                    yield json.loads(data)
        raise StartError("the answer broke off before its end")

    @contextmanager
    def _request(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """An answer with status 200, on a connection of its own. Raises StartError for any other, and for a loss."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS_MAX)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS_MAX)
            connection.request(method, self._base + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                said, code = _error_in(answer.read(ERROR_BYTES_READ).decode("utf-8", "replace"))
                if answer.status == http.client.UNAUTHORIZED:
                    said = "set SEGUE_API_KEY to a key of this deployment"
                kind_of_error = NoRoomError if code == NO_ROOM else StartError
                raise kind_of_error(f"{self._url} refused with status {answer.status}: {said}")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise StartError(
                f"{self._url} does not answer ({error or type(error).__name__}); is a router there? "
                "`segue up` starts one, --url names another"
            ) from None
        except (ValueError, LookupError, TypeError) as error:  # of who reads it, while it comes
            raise StartError(f"what answers at {self._url} is no router ({type(error).__name__})") from None
        finally:
            connection.close()


def _has_port(parts: SplitResult) -> bool:
    """Whether the port is none, or a number that a port can have."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _error_in(text: str) -> tuple[str, str]:
    """Message and code of an error of OpenAI's API; the text itself where it is none."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(text.split())[:200] or "it gave no reason", ""
