"""The paths that take a tokenizer and no worker: POST /tokenize, /detokenize and /v1/messages/count_tokens.

The first two have the bodies that vLLM defined and take as many tokens as the model's context has. The third has the
body of /v1/messages, whose prompt may be longer than the context, up to the bound of one that is to be truncated: a
client asks so as to know. All work on the tokenizer's threads up to the bytes of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from router.openai.fields.generation_fields import ChatFields
from router.openai.fields.ignored import Ignored, in_own_words
from router.openai.fields.request_body import decode
from router.openai.fields.table import read_by_table
from router.openai.messages.fields import MessagesFields, as_chat, too_long_error
from router.openai.prompts.chat_messages import NO_BYTES, chat_options
from router.openai.prompts.prompts import TRUNCATED_CONTEXTS_MAX, TokenIds, Truncation, check_token_ids
from router.openai.serving import OpenAIServing
from router.openai.tools.choice import tool_use
from router.replies import DisconnectedError, send_json, send_request_error
from router.request_context import tenant_of
from router.text.chat_template import ChatOptions
from shared.primitives.errors import RequestError

Work = Callable[[OpenAIServing, bytearray, int], msgspec.Raw]  # of a body and the context length, on a thread


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a prompt or messages; null means the default everywhere."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = NO_BYTES
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: msgspec.Raw = NO_BYTES
    return_token_strs: bool | None = None

    def chat_options(self) -> ChatOptions:
        """How the messages are rendered."""
        return ChatOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs or {},
            tools=tool_use(ChatFields(messages=self.messages, tools=self.tools), Ignored()).shown or None,
        )


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: msgspec.Raw


class TokenizerEndpoint:
    """The ASGI endpoint of a path whose answer takes a tokenizer and no worker."""

    def __init__(self, serving: OpenAIServing, work: Work):
        self._serving = serving
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it holds."""
        try:
            await send_json(send, 200, await self._worked(scope, receive))
        except RequestError as error:
            await send_request_error(scope, send, error, self._serving.settings.retry_after_seconds)
        except DisconnectedError:
            pass

    async def _worked(self, scope: Scope, receive: Receive) -> msgspec.Raw:
        """The answer. The body lives no longer than this call, however slowly the client reads."""
        context_len = self._serving.context_len()
        async with self._serving.bodies.read(scope, receive) as body:
            return await self._serving.prompts.run(
                tenant_of(scope), receive, lambda: self._work(self._serving, body, context_len)
            )


def tokenize(serving: OpenAIServing, body: bytearray, context_len: int) -> msgspec.Raw:
    """The answer of /tokenize; raises `RequestError`. For a tokenizer's thread."""
    fields = decode(body, TokenizeFields)
    serving.check_model(fields.model)
    prompts = serving.prompts
    if bytes(fields.messages) not in (b"", b"null"):
        ids = prompts.chat(fields.messages, context_len, fields.chat_options())
    elif fields.prompt is not None:
        ids = prompts.encode(fields.prompt, context_len, "prompt", fields.add_special_tokens is not False)
    else:
        raise RequestError("either prompt or messages is required", param="prompt")
    strings = serving.tokenizer.token_strings(ids) if fields.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": context_len, "tokens": ids, "token_strs": strings}
    return msgspec.Raw(msgspec.json.encode(answer))


def detokenize(serving: OpenAIServing, body: bytearray, context_len: int) -> msgspec.Raw:
    """The answer of /detokenize; the same."""
    fields = decode(body, DetokenizeFields)
    serving.check_model(fields.model)
    tokenizer = serving.tokenizer
    if bytes(fields.tokens).count(b",") >= context_len:
        raise RequestError(
            f"tokens takes at most {context_len} ids, which is the model's context", param="tokens"
        )
    ids = check_token_ids(decode(fields.tokens, list[int], "tokens"), tokenizer.vocab_size, "tokens")
    return msgspec.Raw(msgspec.json.encode({"prompt": tokenizer.decode_all(ids)}))


def count_tokens(serving: OpenAIServing, body: bytearray, context_len: int) -> msgspec.Raw:
    """The answer of /v1/messages/count_tokens: how long the prompt of a request is, tools and all; the same."""
    try:
        ids = _ids_of_messages(serving, body, context_len)
    except RequestError as error:
        raise too_long_error(error) from None
    return msgspec.Raw(msgspec.json.encode({"input_tokens": len(ids)}))


def _ids_of_messages(serving: OpenAIServing, body: bytearray, context_len: int) -> TokenIds:
    ignored = Ignored()  # an answer of one number names nothing
    asked = read_by_table(body, "messages", MessagesFields, ignored)
    serving.check_model(asked.model)
    longest = TRUNCATED_CONTEXTS_MAX * context_len
    fields = as_chat(asked, longest, ignored)
    whole = Truncation(longest, keeps_end=True)  # nothing is cut off
    try:
        options = chat_options(fields, tool_use(fields, ignored).shown, serving.tokenizer, ignored)
        return serving.prompts.chat(fields.messages, context_len, options, whole)
    except RequestError as error:
        raise in_own_words(error, "messages") from None
