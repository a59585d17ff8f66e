"""From what a client sent as prompt or messages to token ids, on threads beside the event loop.

A request gets a thread from `TokenizerQueue`; there its body is decoded, checked and tokenized in one go, so that what
it is decoded to exists for as many requests at a time as there are threads. The field that may be large comes as its
bytes. How many values it has is counted in them before they become objects, and no text is tokenized further than the
context reaches.

    bytes of a list    counted            bound
    of texts           "  and  \\\\"        prompts_max
    of token ids       ,                  the context
    of lists of ids    [                  prompts_max
    of messages        "role"             the context
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from router.config import RouterConfig
from router.openai.fields.request_body import decode
from router.openai.prompts.chat_messages import (
    MessageFields,
    in_words,
    not_shown,
    template_message,
    without_late_system,
)
from router.openai.prompts.harmony_messages import one_call_each, with_text_defaults
from router.replies import DisconnectedError, OverloadedError
from router.text.chat_template import PLAIN_CHAT, ChatOptions, Message, client_texts
from router.text.tokenizer import Tokenizer, TooLongError
from shared.primitives.errors import RequestError
from shared.primitives.metric_fields import all_declared, durations

T = TypeVar("T")
TokenIds = tuple[int, ...]

TRUNCATED_CONTEXTS_MAX = 4  # contexts that a prompt may have which is to be truncated

SPACES = b" \t\r\n"  # JSON's


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep so many tokens of a prompt, of its end or of its beginning."""

    tokens: int
    keeps_end: bool


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """The prompts of a completion, not yet tokenized."""

    prompt: msgspec.Raw
    truncation: Truncation | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The messages of a chat, not yet rendered and tokenized."""

    messages: msgspec.Raw
    options: ChatOptions
    truncation: Truncation | None = None


@all_declared
@dataclass(slots=True)
class PromptCounters:
    """What passes before a request reaches the core; measurements since they were last published."""

    body_seconds: deque[float] = durations(
        "segue_body_seconds",
        "Seconds from the end of a request's head to that of its body: the client's upload.",
    )
    tokenize_seconds: deque[float] = durations(
        "segue_tokenize_seconds",
        "Seconds from the end of a request's body to its token ids: the wait for a thread, decoding, the chat template "
        "and the tokenizer. Requests that are refused there, and those to /tokenize, count too.",
    )


class Prompts:
    """Tokenizes on threads of its own. All methods but `run`, `close` and the counts are for those threads."""

    def __init__(self, tokenizer: Tokenizer, settings: RouterConfig):
        self._tokenizer = tokenizer
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._queue = TokenizerQueue(settings.tokenizer_threads, settings.tokenizing_max)
        self._running = 0
        self.counters = PromptCounters()

    @property
    def tokenizing(self) -> dict[str, int]:
        """Requests that wait for a thread, and those that have one."""
        return {"waiting": self._queue.waiting, "running": self._running}

    async def run(self, tenant: str, receive: Receive, work: Callable[[], T]) -> T:
        """Run `work` on a thread, when its turn has come.

        Raises what `work` raises, `OverloadedError` when too many wait already, and `DisconnectedError` if the client
        hangs up meanwhile.
        """

        async def hangup() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        began_at = time.perf_counter()
        await self._queue.acquire(tenant, hangup)
        self._running += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._ended)
        try:
            # a thread cannot be cancelled: it keeps its slot until it ends
            return await asyncio.shield(running)
        finally:
            self.counters.tokenize_seconds.append(time.perf_counter() - began_at)
            del running  # what `work` raised holds this frame; held in return, the prompt would be a cycle

    def _ended(self, running: asyncio.Future[Any] | Future[Any]) -> None:
        if not running.cancelled():
            running.exception()  # is raised where it is awaited, if anybody still waits
        self._running -= 1
        self._queue.release()

    def close(self) -> None:
        """Cancel what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def token_ids(
        self, asked: ChatPrompt | CompletionPrompt, context_len: int, choices: int
    ) -> list[TokenIds]:
        """The token ids of each prompt of a request that wants so many answers to each."""
        if isinstance(asked, ChatPrompt):
            return [self.chat(asked.messages, context_len, asked.options, asked.truncation)]
        prompts_max = self._settings.prompts_max // choices
        return self.completion(
            asked.prompt, context_len, prompts_max, asked.truncation, asked.add_special_tokens
        )

    def completion(
        self,
        prompt: msgspec.Raw,
        context_len: int,
        prompts_max: int,
        truncation: Truncation | None = None,
        add_special_tokens: bool = True,
    ) -> list[TokenIds]:
        """The token ids of each prompt of a completion request, `prompts_max` of them at most."""
        most = context_len if truncation is None else TRUNCATED_CONTEXTS_MAX * context_len
        prompts = self._decoded(bytes(prompt).strip(SPACES), most)
        if len(prompts) > prompts_max:
            raise _too_many_prompts(prompts_max)
        found = (self._prompt(one, most, add_special_tokens) for one in prompts)
        return [self._compact(_cut(ids, truncation), "prompt") for ids in found]

    def chat(
        self,
        messages: msgspec.Raw,
        context_len: int,
        options: ChatOptions = PLAIN_CHAT,
        truncation: Truncation | None = None,
    ) -> TokenIds:
        """The token ids of a chat, rendered with the model's template."""
        if truncation is not None:
            context_len *= TRUNCATED_CONTEXTS_MAX
        self._check_options(options)
        if (roles := bytes(messages).count(b'"role"')) > context_len:
            raise _too_long(f"messages has {roles} messages", context_len, "messages")
        decoded = decode(messages, list[MessageFields], "messages")
        if not decoded:
            raise RequestError("messages must be a list of at least one message", param="messages")
        if len(decoded) > context_len:  # their roles may be spelled with escapes
            raise _too_long(f"messages has {len(decoded)} messages", context_len, "messages")
        parsed = [template_message(message, f"messages[{at}]") for at, message in enumerate(decoded)]
        chars = sum(len(text) for message in parsed for text in client_texts(message))
        self._check_chars(chars, context_len, "messages")
        if (
            any(message["role"] == "system" for message in parsed[1:])
            and not self._tokenizer.takes_late_system
        ):
            parsed = without_late_system(parsed)
        if self._tokenizer.answers.format.channels and self._tokenizer.shows_tools:
            parsed = one_call_each(parsed)
            options = replace(options, tools=with_text_defaults(options.tools or ()) or None)
        parsed, options = self._with_tools(parsed, options)
        try:
            ids = self._tokenizer.encode_chat(
                parsed, options, context_len, self._settings.allow_control_tokens
            )
        except TooLongError as error:
            raise _refused("messages", error) from None
        return self._compact(_cut(ids, truncation), "messages")

    def _compact(self, ids: TokenIds, param: str) -> TokenIds:
        """Store the ids in little memory; `RequestError` for one that the tokenizer has and the model has not."""
        most = self._tokenizer.vocab_size - 1
        if ids and (largest := max(ids)) > most:
            raise RequestError(
                f"{param} has token {largest} of this model's tokenizer; by the vocab_size of its config.json the "
                f"model has 0 to {most}",
                param=param,
            )
        return self._tokenizer.compact(ids)

    def _with_tools(self, messages: list[Message], options: ChatOptions) -> tuple[list[Message], ChatOptions]:
        """As the model's chat template can show them."""
        if not (options.tools or any("tool_calls" in message for message in messages)):
            return messages, options
        if self._tokenizer.shows_tools:
            return messages, options
        reader = self._tokenizer.answers
        if not reader.format.given:
            raise not_shown("tools" if options.tools else "messages")
        return in_words(messages, options.tools or (), reader), replace(options, tools=None)

    def _check_options(self, options: ChatOptions) -> None:
        """Raise `RequestError` for a variable that is not the client's to set."""
        for name in options.variables:
            if name in self._tokenizer.reserved_variables:
                raise RequestError(
                    f"chat_template_kwargs.{name} is set by the server", param="chat_template_kwargs"
                )

    def encode(self, text: str, context_len: int, param: str, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`; raises `RequestError` as soon as it is known that there are too many."""
        self._check_chars(len(text), context_len, param)
        try:
            return self._tokenizer.encode(text, add_special_tokens, context_len)
        except TooLongError as error:
            raise _refused(param, error) from None

    def _check_chars(self, chars: int, context_len: int, param: str) -> None:
        """Refuse beforehand what no tokenizer could make short enough."""
        if chars > context_len * self._tokenizer.longest_token_chars:
            raise _too_long(f"{param} has {chars} characters", context_len, param)

    def _decoded(self, prompt: bytes, context_len: int) -> list[str] | list[list[int]]:
        """The prompts in OpenAI's four forms: text, token ids, and lists of either."""
        if prompt.startswith(b'"'):
            return [decode(prompt, str, "prompt")]
        if not prompt.startswith(b"["):
            raise _malformed_prompt()
        first = prompt[1:].lstrip(SPACES)[:1]
        if first == b"]":
            raise RequestError("prompt must not be empty", param="prompt")
        try:
            if first == b'"':
                return self._texts(prompt)
            if first == b"[":
                return self._lists_of_ids(prompt)
            return [self._ids(prompt, context_len)]
        except RequestError as error:
            raise error if error.param in ("prompt", None) else _malformed_prompt() from None

    def _texts(self, prompt: bytes) -> list[str]:
        quotes = prompt.count(b'"') - prompt.count(b'\\"')  # 1 or 2 for each text, whatever it holds
        if quotes > 2 * self._settings.prompts_max:
            raise _too_many_prompts(self._settings.prompts_max)
        return decode(prompt, list[str], "prompt")

    def _lists_of_ids(self, prompt: bytes) -> list[list[int]]:
        if prompt.count(b"[") > self._settings.prompts_max + 1:
            raise _too_many_prompts(self._settings.prompts_max)
        return decode(prompt, list[list[int]], "prompt")

    def _ids(self, prompt: bytes, context_len: int) -> list[int]:
        _check_room(prompt.count(b",") + 1, context_len)
        return decode(prompt, list[int], "prompt")

    def _prompt(self, prompt: str | list[int], context_len: int, add_special_tokens: bool) -> TokenIds:
        if isinstance(prompt, str):
            ids = self.encode(prompt, context_len, "prompt", add_special_tokens) if prompt else ()
        else:
            _check_room(len(prompt), context_len)
            ids = check_token_ids(prompt, self._tokenizer.vocab_size, "prompt")
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        return ids


def _cut(ids: TokenIds, truncation: Truncation | None) -> TokenIds:
    if truncation is None or len(ids) <= truncation.tokens:
        return ids
    return ids[-truncation.tokens :] if truncation.keeps_end else ids[: truncation.tokens]


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> TokenIds:
    """`ids` if they are all token ids of the model."""
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise RequestError(f"{param} must hold token ids from 0 to {vocab_size - 1}", param=param)
    return tuple(ids)


def _too_many_prompts(most: int) -> RequestError:
    message = f"prompt takes at most {most} prompts here, each of them n times, got more"
    return RequestError(message, param="prompt")


def _check_room(tokens: int, context_len: int) -> None:
    if tokens >= context_len:
        raise RequestError(
            f"prompt has {tokens} tokens and leaves no room for output in the model's context of {context_len} tokens",
            param="prompt",
            code="context_length_exceeded",
        )


def _too_long(what: str, context_len: int, param: str) -> RequestError:
    most = f"more than the model's context of {context_len} tokens can hold"
    return RequestError(f"{what}, {most}", param=param, code="context_length_exceeded")


def _refused(param: str, error: TooLongError) -> RequestError:
    return RequestError(f"{param} has {error}", param=param, code="context_length_exceeded")


def _malformed_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
    )


# ---- tenants take turns at the tokenizer threads ---------------------------------------------------------------------
# One place for every request that has text to tokenize. A turn is one request however large it is, because its work is
# bounded and cannot be interrupted: a tenant waits for at most one request of each other tenant. When too many wait,
# the tenant with the most of them loses its last one, so that no tenant can keep the others out.
#
# It knows neither what a request holds nor what a thread does. It belongs to the event loop.


Turn = asyncio.Future[None]


class TokenizerQueue:
    """`slots` requests at a time; at most `waiting_max` wait."""

    def __init__(self, slots: int, waiting_max: int):
        self._free = slots
        self._waiting_max = waiting_max
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()  # the tenant in front has the next turn

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(map(len, self._lines.values()))

    async def acquire(self, tenant: str, hangup: Callable[[], Awaitable[None]]) -> None:
        """Wait for a slot; `release` gives it back.

        Raises `OverloadedError` if too many wait, `DisconnectedError` as soon as `hangup` returns.
        """
        if self._free:
            self._free -= 1
            return
        self._make_room(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        watch = asyncio.ensure_future(hangup())
        watch.add_done_callback(lambda _: _fail(turn, DisconnectedError()))
        try:
            await turn
        except BaseException:
            self._give_up(tenant, turn)
            raise
        finally:
            watch.cancel()

    def release(self) -> None:
        """A slot is free: the next in turn gets it."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            turn = line.popleft()
            self._lines.move_to_end(tenant)
            if not line:
                del self._lines[tenant]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _make_room(self, tenant: str) -> None:
        """Raise `OverloadedError`, or refuse another tenant's last request, if too many wait."""
        if self.waiting < self._waiting_max:
            return
        overloaded = OverloadedError(
            "too many prompts are waiting to be tokenized: try again later", "tokenizer_queue"
        )
        longest = max(self._lines, key=lambda name: len(self._lines[name]), default=tenant)
        if longest == tenant or len(self._lines[longest]) <= len(self._lines.get(tenant, ())) + 1:
            raise overloaded
        _fail(self._lines[longest].pop(), overloaded)

    def _give_up(self, tenant: str, turn: Turn) -> None:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.release()  # the slot came at the same time
            return
        line = self._lines.get(tenant, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._lines.pop(tenant, None)


def _fail(turn: Turn, error: Exception) -> None:
    if not turn.done():
        turn.set_exception(error)
