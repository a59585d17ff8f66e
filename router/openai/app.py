"""The router's HTTP application: which endpoint answers which path, its own pages, and the shape of every error.

FastAPI routes, and little more: its documentation pages are off, and the endpoints that read bodies are plain ASGI
(`completions`, `tokenize`), so its validation and its 422 are not used. A POST for one of these does not pass through
FastAPI's layers: each of them would be resumed with every piece of a stream. Paths come as they were sent, without
decoding. `RequestIdMiddleware` wraps everything: it draws the request's id, writes the one log line of a request, and
turns an uncaught error into a 500 without details. Within it `BrowserGuard` keeps web pages out, and where there are
API keys `KeyGuard` keeps out those who have none.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.browser_guard import guarded
from router.live.endpoint import LiveEndpoint
from router.openai.completions import CompletionEndpoint
from router.openai.request_log import HttpCounters, RequestLog
from router.openai.serving import OpenAIServing
from router.openai.tokenize import TokenizerEndpoint, count_tokens, detokenize, tokenize
from router.replies import SERVED_PATHS, describe_unknown, error_body, error_of, send_json, speaks_anthropic
from router.request_context import context_of
from shared.primitives.errors import RequestError
from shared.primitives.version import VERSION
from shared.process.health import Health
from shared.process.logs import places

log = structlog.get_logger(__name__)

MODEL_OWNER = "segue"
READ = ["GET", "HEAD"]  # load balancers ask with HEAD; the connection leaves out the body

_PLAIN_ID = re.compile(rb"[A-Za-z0-9_.:/+=-]{1,128}")


def make_app(
    serving: OpenAIServing,
    health: Health,
    draw_rid: Callable[[], str],
    behind_keys: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    live: LiveEndpoint | None = None,
) -> ASGIApp:
    """The application around a running shell; `draw_rid` gives the id of a new request."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_failure)  # Starlette raises it again once this is sent
    hot: dict[str, ASGIApp] = {
        "/v1/completions": CompletionEndpoint(serving, "completions"),
        "/v1/chat/completions": CompletionEndpoint(serving, "chat"),
        "/v1/responses": CompletionEndpoint(serving, "responses"),
        "/v1/messages": CompletionEndpoint(serving, "messages"),
        "/v1/messages/count_tokens": TokenizerEndpoint(serving, count_tokens),
        "/tokenize": TokenizerEndpoint(serving, tokenize),
        "/detokenize": TokenizerEndpoint(serving, detokenize),
    }
    app.router.routes.extend(Route(path, endpoint, methods=["POST"]) for path, endpoint in hot.items())
    _add_info_pages(app, serving, health)

    def routed(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint: ASGIApp | None = hot.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None and live is not None and live.takes(scope):
            endpoint = live
        return (endpoint or app)(scope, receive, send)

    around = guarded(behind_keys(routed), serving.settings)
    request_log = RequestLog(serving.shell.debug, keys_asked=bool(serving.settings.api_keys_file))
    return RequestIdMiddleware(around, draw_rid, serving.http_counters, request_log)


async def _answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and wrong methods. The path is the client's text and is not repeated."""
    assert isinstance(error, HTTPException)
    context_of(request.scope).connection.count_refusal(error.status_code)
    messages = {404: describe_unknown(request.url.path), 405: "this path does not support this method"}
    message = messages.get(error.status_code, "the request cannot be served")
    code = "method_not_allowed" if error.status_code == 405 else None
    return JSONResponse(
        error_of(request.scope, error.status_code, message, code=code), error.status_code, error.headers
    )


async def _answer_failure(request: Request, error: Exception) -> JSONResponse:
    """A fault of this program; `RequestIdMiddleware` logs it."""
    del error
    return JSONResponse(_failure_body(request.scope), 500)


def _failure_body(scope: Scope) -> dict[str, Any]:
    return error_of(scope, 500, "the router failed; its log says where")


def _echoed_id(scope: Scope) -> bytes | None:
    """The id that a client has given its request, if it is a plain word: its own logs know the answer by it."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _PLAIN_ID.fullmatch(given) else None


class RequestIdMiddleware:
    """Around the application: ids, one log line a request, and a 500 for errors that nothing else caught."""

    def __init__(self, app: ASGIApp, draw_rid: Callable[[], str], counters: HttpCounters, log: RequestLog):
        self._app = app
        self._counters = counters
        self._log = log
        self._draw_rid = draw_rid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of ASGI scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        rid, status = self._draw_rid(), 0
        context.rid = rid
        if scope["path"][:-1] in SERVED_PATHS and scope["path"][-1] == "/":  # some clients join addresses so
            scope["path"] = scope["path"][:-1]
        given = _echoed_id(scope)
        context.client_id = given.decode() if given else ""
        ids = [(b"x-request-id", given or rid.encode()), (b"x-segue-request-id", rid.encode())]
        if speaks_anthropic(scope):
            ids.append((b"request-id", rid.encode()))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._counters.answered(scope["path"], status)
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a bug, or a panic in Rust: log the place, never the values
            log.error("http.error", rid=rid, error=type(error).__name__, at=places(error))
            context.connection.count_refusal(500)
            if status == 0:
                await send_json(send_with_id, 500, _failure_body(scope))
        self._log.write(context, scope["path"], status, asyncio.get_running_loop().time() - context.head_at)


# ---- what this server is ---------------------------------------------------------------------------------------


def _add_info_pages(app: FastAPI, serving: OpenAIServing, health: Health) -> None:
    """The paths that say what this server is: its model, its tokenizer, its version, and whether it is ready.

    With the shapes of vLLM (`/version`, `/tokenizer_info`), SageMaker (`/ping`), and OpenAI and Anthropic at once
    (`/v1/models`: their clients read different fields of it).
    """
    _add_models(app, serving)
    _add_readiness(app, health)
    tokenizer_info = serving.tokenizer.info

    @app.api_route("/", methods=READ)
    async def paths() -> JSONResponse:
        return JSONResponse({"name": "segue", "paths": SERVED_PATHS})

    @app.api_route("/version", methods=READ)
    async def program_version() -> JSONResponse:
        return JSONResponse({"version": VERSION})

    @app.api_route("/tokenizer_info", methods=READ)
    async def tokenizer() -> JSONResponse:
        return JSONResponse(tokenizer_info)


def _add_models(app: FastAPI, serving: OpenAIServing) -> None:
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).isoformat()

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": MODEL_OWNER,
            "root": serving.settings.model_name,
            "parent": None,
            "max_model_len": _context_len(serving),
            "type": "model",
            "display_name": name,
            "created_at": created_at,
            "lifecycle": "active",
            "max_input_tokens": _context_len(serving),
            "max_tokens": _context_len(serving),
        }

    @app.api_route("/v1/models", methods=READ)
    async def models() -> JSONResponse:
        names = serving.settings.model_names
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [model(name) for name in names], **pages})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def one_model(request: Request, name: str) -> JSONResponse:
        if unquote(name) not in serving.settings.model_names:
            code, message = "model_not_found", "the model does not exist"
            return JSONResponse(error_of(request.scope, 404, message, param="model", code=code), 404)
        return JSONResponse(model(unquote(name)))


def _context_len(serving: OpenAIServing) -> int | None:
    """What requests are held to: the folder's, or the workers' where it is less; None while neither is known."""
    try:
        return serving.context_len()
    except RequestError:
        return None


def _add_readiness(app: FastAPI, health: Health) -> None:
    """Readiness for clients and load balancers; probes are on the admin port."""

    async def readiness() -> Response:
        if health.ready:
            return Response(health.report(), media_type="application/json")
        body = error_body(503, f"the router is not ready: {health.doing}")
        return JSONResponse(body | {"ready": False, "doing": health.doing}, 503)

    app.add_api_route("/health", readiness, methods=READ)
    app.add_api_route("/ping", readiness, methods=[*READ, "POST"])  # SageMaker's name
