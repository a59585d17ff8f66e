"""The JSON of OpenAI's answers: objects of completions and chat completions, whole and in chunks.

A chunk is made at once, a whole answer in parts. Pure functions of text and counts; no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.effects import RequestFailed, Usage
from router.openai.answers.json_parts import KeptTexts, Parts, list_parts, object_parts
from router.openai.answers.kept_answer import KeptChoice
from router.openai.answers.logprob_objects import LogprobObjects
from router.openai.answers.prompt_echo import PromptEcho
from router.openai.answers.response_stream import TextDelta
from router.parsers.answer_deltas import NAMES
from router.replies import failure_body

Json = dict[str, Any]
COMMENT = b": waiting\n\n"  # server-sent events ignore lines that begin with a colon
Event = Json | msgspec.Raw | list[Json]  # of a stream: one, its JSON, or several that belong together


class AnswerObjects(Protocol):
    """One kind of answer."""

    done: bool  # whether a stream that is complete ends with [DONE]
    waiting: bytes  # what a silent stream gets
    held_bytes: int  # of what a stream has written, kept until its end

    def opening(self, index: int) -> Event | None:
        """What comes before the first piece of a choice, if this kind has that."""

    def chunk(self, piece: TextDelta) -> Event:
        """One piece of a stream."""

    def usage_chunk(self, usage: Json) -> Event:
        """The last of a stream whose request asked for usage."""

    def failed(self, failure: RequestFailed) -> Event:
        """The last of a stream that is interrupted."""

    def whole(self, choices: Sequence[KeptChoice], usage: Json) -> Parts:
        """An answer that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHead:
    """What every object of one answer repeats."""

    answer_id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None
    chunk_usage: bool  # chunks say `usage: null` when the last one has it
    prompt_tokens: tuple[int, ...] = ()  # of each choice; if they are there, chunks have the usage so far
    logprobs: LogprobObjects | None = None  # if they were asked for

    def chunk(self, kind: str) -> Json:
        """A chunk without choices."""
        return self.whole(kind, []) | ({"usage": None} if self.chunk_usage else {})

    def usage_so_far(self, index: int, tokens: int) -> Json | None:
        """Usage of one choice, as vLLM's chunks have it; None where the last chunk alone has usage."""
        if not self.prompt_tokens:
            return None
        prompt = self.prompt_tokens[index]
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def whole(self, kind: str, choices: list[Json] | Parts) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class ChunkFrame:
    """The JSON around the choice of each chunk of an answer, made once: a stream has a chunk for each token."""

    def __init__(self, chunk: Json):
        """`chunk` has no choices yet; of its fields only usage may follow them."""
        self._before, choices, self._after = msgspec.json.encode(chunk).rpartition(b"[]")
        assert choices, chunk

    def around(self, choice: Json, usage: Json | None = None) -> msgspec.Raw:
        """The chunk of one choice, maybe with the usage so far."""
        if usage is not None:
            both = msgspec.json.encode(choice), msgspec.json.encode(usage)
            return msgspec.Raw(b'%b[%b],"usage":%b}' % (self._before, *both))
        return msgspec.Raw(b"%b[%b]%b" % (self._before, msgspec.json.encode(choice), self._after))


class CompletionObjects:
    """Objects of /v1/completions."""

    done = True
    waiting = COMMENT
    held_bytes = 0

    def __init__(self, head: ObjectHead):
        self._head = head
        self._empty = head.chunk("text_completion")
        self._frame = ChunkFrame(self._empty)

    def opening(self, index: int) -> Json | None:
        del index
        return None

    def chunk(self, piece: TextDelta) -> Event:
        return self._frame.around(self._choice(piece), self._head.usage_so_far(piece.index, piece.tokens))

    def usage_chunk(self, usage: Json) -> Json:
        return self._empty | {"usage": usage}

    def failed(self, failure: RequestFailed) -> Event:
        return failure_body(failure)

    def whole(self, choices: Sequence[KeptChoice], usage: Json) -> Parts:
        head = self._head.whole("text_completion", list_parts(self._whole_choices(choices)))
        return object_parts({**head, "usage": usage})

    def _whole_choices(self, choices: Sequence[KeptChoice]) -> Iterator[Parts]:
        """Objects of all choices. Choices of one prompt stand together, so the text of one prompt at a time is kept."""
        logprobs, shown = self._head.logprobs, None
        for kept in choices:
            if logprobs and kept.prompt and (shown is None or shown.prompt is not kept.prompt):
                shown = PromptTexts(kept.prompt, logprobs)
            piece = kept.joined()
            choice: Json = {
                "index": piece.index,
                "text": piece.text,
                "logprobs": completion_logprobs(kept, shown.echo if shown else {}, logprobs)
                if logprobs
                else None,
                "finish_reason": piece.finish_reason,
            }
            if shown and shown.prompt.scored:
                choice["prompt_logprobs"] = Parts(shown.logprobs)
            yield object_parts(_extended(choice, piece, kept.token_ids))

    def _choice(self, piece: TextDelta) -> Json:
        logprobs = self._head.logprobs
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs.completion(piece.entries) if logprobs and piece.entries else None,
            "finish_reason": piece.finish_reason,
        }
        return _extended(choice, piece, piece.token_ids)


class ChatObjects:
    """Objects of /v1/chat/completions."""

    done = True
    waiting = COMMENT
    held_bytes = 0

    def __init__(self, head: ObjectHead, *, older: bool = False):
        """`older`: a call is told as OpenAI's API did before it had tools, and there is one at most."""
        self._head = head
        self._older = older
        self._empty = head.chunk("chat.completion.chunk")
        self._frame = ChunkFrame(self._empty)

    def opening(self, index: int) -> Event | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame.around(choice, self._head.usage_so_far(index, 0))

    def chunk(self, piece: TextDelta) -> Event:
        delta: Json = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta |= _thoughts(piece.reasoning)
        if piece.calls and self._older:
            delta |= self._function_call(piece)
        elif piece.calls:
            delta["tool_calls"] = [{"index": call.pop("call"), **call} for call in self._calls(piece)]
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
        }
        usage = self._head.usage_so_far(piece.index, piece.tokens)
        return self._frame.around(_extended(choice, piece, piece.token_ids), usage)

    def usage_chunk(self, usage: Json) -> Json:
        return self._empty | {"usage": usage}

    def failed(self, failure: RequestFailed) -> Event:
        return failure_body(failure)

    def whole(self, choices: Sequence[KeptChoice], usage: Json) -> Parts:
        logprobs, prompt = self._head.logprobs, choices[0].prompt
        body = {
            **self._head.whole("chat.completion", list_parts(map(self._whole_choice, choices))),
            "usage": usage,
        }
        if logprobs and prompt and prompt.scored:
            body["prompt_logprobs"] = Parts(logprobs.prompt_texts(prompt.entries()))
        return object_parts(body)

    def _whole_choice(self, kept: KeptChoice) -> Parts:
        logprobs, piece = self._head.logprobs, kept.joined()
        choice = {
            "index": piece.index,
            "message": self._message(piece),
            "logprobs": Parts(logprobs.chat_texts(kept.entries.batches()))
            if logprobs and kept.entries
            else None,
            "finish_reason": self._finish_reason(piece),
        }
        return object_parts(_extended(choice, piece, kept.token_ids))

    def _logprobs(self, piece: TextDelta) -> Json | None:
        logprobs = self._head.logprobs
        return logprobs.chat(piece.entries) if logprobs and piece.entries else None

    def _message(self, piece: TextDelta) -> Json:
        """The message of an answer that is not streamed."""
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            message |= _thoughts(piece.reasoning)
        if piece.calls:
            message["content"] = piece.text or None
        if piece.calls and self._older:
            message |= self._function_call(piece)
        elif piece.calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "call"} for call in self._calls(piece)
            ]
        return message

    def _finish_reason(self, piece: TextDelta) -> str | None:
        return "function_call" if self._older and piece.finish_reason == "tool_calls" else piece.finish_reason

    def _function_call(self, piece: TextDelta) -> Json:
        """What a piece has of the first call, under its older name; nothing of others."""
        first = [call["function"] for call in self._calls(piece) if call["call"] == 0]
        return {"function_call": first[0]} if first else {}

    def _calls(self, piece: TextDelta) -> list[Json]:
        """One object for what the piece has of each call; only the first of a call has its id and its name."""
        calls: list[Json] = []
        for part in piece.calls:
            custom = part.kind in ("custom_call", "input")
            kind, value = ("custom", "input") if custom else ("function", "arguments")
            if part.kind in NAMES:
                named = call_id(self._head.answer_id, piece.index, part.call)
                head = {"call": part.call, "id": named, "type": kind}
                calls.append({**head, kind: {"name": part.text, value: ""}})
            elif calls and calls[-1]["call"] == part.call:
                calls[-1][kind][value] += part.text
            else:
                calls.append({"call": part.call, kind: {value: part.text}})
        return calls


def call_id(answer_id: str, choice: int, call: int) -> str:
    """Nine letters and digits: Mistral's chat template takes no other ids back."""
    return hashlib.sha256(f"{answer_id} {choice} {call}".encode()).hexdigest()[:9]


def _thoughts(text: str) -> Json:
    """As SGLang and DeepSeek, and as vLLM names them."""
    return {"reasoning_content": text, "reasoning": text}


def _extended(choice: Json, piece: TextDelta, token_ids: tuple[int, ...] | msgspec.Raw | None) -> Json:
    """With what vLLM tells beyond OpenAI's fields: what ended the text, and its tokens if they were asked for."""
    if piece.finish_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    if token_ids:
        choice["token_ids"] = token_ids
    return choice


def usage_json(usages: Iterable[Usage], reasoning_tokens: int = 0) -> Json:
    """OpenAI's usage object for all choices of an answer together."""
    listed = list(usages)
    prompt = sum(usage.prompt_tokens for usage in listed)
    completion = sum(usage.completion_tokens for usage in listed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in listed)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


# ---- logprobs of a prompt and, behind its echo, of an output; of several choices made once ---------------------------


Texts = Iterable[bytes]


class PromptTexts:
    """Texts that report one prompt."""

    def __init__(self, prompt: PromptEcho, objects: LogprobObjects):
        self.prompt = prompt
        # The items of each list of `logprobs`, if the echo has logprobs; and `prompt_logprobs`, if they were asked for.
        self.echo: dict[str, Texts] = {}
        self.logprobs: Texts = ()
        if prompt.echo_top >= 0:
            lists = objects.completion_lists(prompt.echoed)
            self.echo = {name: self._kept(texts) for name, texts in lists.items()}
        if prompt.scored:
            self.logprobs = self._kept(objects.prompt_texts(prompt.entries()))

    def _kept(self, texts: Iterator[bytes]) -> Texts:
        return KeptTexts(texts) if self.prompt.choices > 1 else texts


def completion_logprobs(choice: KeptChoice, echo: dict[str, Texts], objects: LogprobObjects) -> Parts | None:
    """`logprobs` of a choice of completions, behind those of its prompt; None: there are none."""
    if not (echo or choice.entries):
        return None
    own = objects.completion_lists(choice.entries.batches)
    comma = bool(echo and choice.entries)
    return object_parts(
        {name: Parts(_one_list(echo.get(name, ()), items, comma=comma)) for name, items in own.items()}
    )


def _one_list(first: Texts, second: Texts, *, comma: bool) -> Iterator[bytes]:
    yield b"["
    yield from first
    if comma:
        yield b","
    yield from second
    yield b"]"
