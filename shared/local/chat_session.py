"""A conversation with a router over HTTP: turns go out, text comes back while it is generated.

The standard library is enough, so that whoever has the command has this, too: no package of a role is needed.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from shared.primitives.errors import StartError

ANSWER_SECONDS_MAX = 600.0  # without a byte
CONNECT_SECONDS_MAX = 10.0
ERROR_BYTES_READ = 65_536


class AnswerPiece(NamedTuple):
    """A part of an answer as it comes; a thought is what the model says to itself before it answers."""

    text: str
    thought: bool = False


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
        for chunk in self._events("POST", "/chat/completions", json.dumps(body).encode()):
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
                said = _message_in(answer.read(ERROR_BYTES_READ).decode("utf-8", "replace"))
                if answer.status == http.client.UNAUTHORIZED:
                    said = "set SEGUE_API_KEY to a key of this deployment"
                raise StartError(f"{self._url} refused with status {answer.status}: {said}")
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


def _message_in(text: str) -> str:
    """What an error of OpenAI's API says; the text itself where it is none."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200] or "it gave no reason"
