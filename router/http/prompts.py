"""From what a client sent as prompt or messages to token ids.

Everything here may take long for a large body, so `Prompts` runs it on a few threads of its own and bounds the number
of waiting requests. Text that cannot fit into the context is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from router.config import RouterConfig
from router.http.request_body import missing_field
from router.http.responses import OverloadedError
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError

T = TypeVar("T")
TokenIds = tuple[int, ...]

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NOT_SUPPORTED_IN_MESSAGES = ("tool_calls", "function_call", "audio")


class Prompts:
    """Tokenizes on threads of its own."""

    def __init__(self, tokenizer: Tokenizer, settings: RouterConfig):
        self._tokenizer = tokenizer
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._waiting = 0

    async def completion(self, prompt: object, context_len: int) -> list[TokenIds]:
        """The token ids of each prompt of a completion request."""
        return await self.run(lambda: self._completion(prompt, context_len))

    async def chat(self, messages: object, context_len: int, add_generation_prompt: bool = True) -> TokenIds:
        """The token ids of a chat, rendered with the model's template."""
        return await self.run(lambda: self._chat(messages, context_len, add_generation_prompt))

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop; raises `OverloadedError` when too many wait already."""
        if self._waiting >= self._settings.tokenizing_max:
            raise OverloadedError("too many prompts are waiting to be tokenized: try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Cancel what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def encode(self, text: str, context_len: int, param: str, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`; refuses beforehand what no tokenizer could make short enough."""
        chars_max = context_len * self._tokenizer.longest_token_chars
        if len(text) > chars_max:
            raise RequestError(
                f"{param} has {len(text)} characters, more than the model's context of {context_len} tokens"
                " can hold",
                param=param,
                code="context_length_exceeded",
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _completion(self, prompt: object, context_len: int) -> list[TokenIds]:
        prompts = _split(prompt)
        if len(prompts) > self._settings.prompts_max:
            raise RequestError(
                f"prompt takes at most {self._settings.prompts_max} prompts, got {len(prompts)}",
                param="prompt",
            )
        return [self._prompt_ids(one, context_len) for one in prompts]

    def _prompt_ids(self, prompt: object, context_len: int) -> TokenIds:
        if isinstance(prompt, str):
            ids = self.encode(prompt, context_len, "prompt") if prompt else ()
        elif isinstance(prompt, list):
            ids = self._checked_ids(prompt, context_len)
        else:
            raise _malformed_prompt()
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        return ids

    def _checked_ids(self, ids: list[Any], context_len: int) -> TokenIds:
        if len(ids) >= context_len:
            raise RequestError(
                f"prompt has {len(ids)} tokens and leaves no room for output in the model's context of"
                f" {context_len} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        return check_token_ids(ids, self._tokenizer.vocab_size, "prompt")

    def _chat(self, messages: object, context_len: int, add_generation_prompt: bool) -> TokenIds:
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list of at least one message", param="messages")
        parsed = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        text = self._tokenizer.render(parsed, add_generation_prompt)
        return self.encode(text, context_len, "messages", add_special_tokens=False)


def check_token_ids(ids: list[Any], vocab_size: int, param: str) -> TokenIds:
    """`ids` if they are all token ids of the model."""
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise RequestError(f"{param} must hold token ids from 0 to {vocab_size - 1}", param=param)
    return tuple(ids)


def _split(prompt: object) -> list[Any]:
    """The prompts in OpenAI's four forms: text, token ids, and lists of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _malformed_prompt()
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def _malformed_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
    )


def _message(message: object, param: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RequestError(f"{param} must be an object with role and content", param=param)
    role = message.get("role")
    if role is None:
        raise missing_field(f"{param}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    for name in _NOT_SUPPORTED_IN_MESSAGES:
        if message.get(name):
            raise RequestError(f"{param}.{name} is not supported by this server", param=f"{param}.{name}")
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{param}.content")}


def _content(content: object, param: str) -> str:
    if content is None:
        raise missing_field(param)
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{param} must be a string or a list of text parts", param=param)
    return "\n".join(_text_part(part, f"{param}[{at}]") for at, part in enumerate(content))


def _text_part(part: object, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise RequestError(f"{param} must be a part of type text: this model reads text only", param=param)
    text = part.get("text")
    if text is None:
        raise missing_field(f"{param}.text")
    if not isinstance(text, str):
        raise RequestError(f"{param}.text must be a string", param=f"{param}.text")
    return text
