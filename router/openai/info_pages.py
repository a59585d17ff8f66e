"""The paths that say what this server is: its model, its tokenizer, its version, and whether it is ready.

With the shapes of vLLM (`/version`, `/tokenizer_info`), SageMaker (`/ping`), and OpenAI and Anthropic at once
(`/v1/models`: their clients read different fields of it).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from router.openai.serving import OpenAIServing
from router.replies.known_paths import SERVED
from router.replies.replies import error_body, error_of
from shared.primitives.errors import RequestError
from shared.process.health import Health

MODEL_OWNER = "segue"
READ = ["GET", "HEAD"]  # load balancers ask with HEAD; the connection leaves out the body


def add_info_pages(app: FastAPI, serving: OpenAIServing, health: Health) -> None:
    """Add them all to `app`."""
    _add_models(app, serving)
    _add_readiness(app, health)
    own = version("segue")
    tokenizer_info = serving.tokenizer.info

    @app.api_route("/", methods=READ)
    async def paths() -> JSONResponse:
        return JSONResponse({"name": "segue", "paths": SERVED})

    @app.api_route("/version", methods=READ)
    async def program_version() -> JSONResponse:
        return JSONResponse({"version": own})

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
