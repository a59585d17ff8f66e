"""POST /tokenize and /detokenize, with the bodies that vLLM defined."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from router.http.completions import OpenAIServing
from router.http.prompts import check_token_ids
from router.http.request_body import TooLargeError, convert, refuse_too_large
from router.http.responses import DisconnectedError, send_json, send_request_error
from shared.errors import RequestError


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenizeEndpoint:
    """The ASGI endpoint of one of the two paths."""

    def __init__(self, serving: OpenAIServing, *, to_text: bool):
        self._serving = serving
        self._to_text = to_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it holds."""
        try:
            body = await self._serving.read(scope, receive)
            await send_json(
                send, 200, await (self._detokenize(body) if self._to_text else self._tokenize(body))
            )
        except TooLargeError as error:
            await refuse_too_large(error, receive, send)
        except RequestError as error:
            await send_request_error(send, error, self._serving.settings.retry_after_seconds)
        except DisconnectedError:
            pass

    async def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = convert(body, TokenizeFields)
        self._serving.check_model(fields.model or self._serving.settings.model_name)
        context_len, prompts = self._serving.context_len(), self._serving.prompts
        if fields.messages is not None:
            ids = await prompts.chat(fields.messages, context_len, fields.add_generation_prompt)
        elif fields.prompt is not None:
            text, special = fields.prompt, fields.add_special_tokens
            ids = await prompts.run(lambda: prompts.encode(text, context_len, "prompt", special))
        else:
            raise RequestError("either prompt or messages is required", param="prompt")
        strings = self._serving.tokenizer.token_strings(ids) if fields.return_token_strs else None
        return {"count": len(ids), "max_model_len": context_len, "tokens": ids, "token_strs": strings}

    async def _detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = convert(body, DetokenizeFields)
        tokenizer, prompts = self._serving.tokenizer, self._serving.prompts
        self._serving.check_model(fields.model or self._serving.settings.model_name)
        ids = await prompts.run(lambda: check_token_ids(fields.tokens, tokenizer.vocab_size, "tokens"))
        return {"prompt": await prompts.run(lambda: tokenizer.decode_all(ids))}
