"""The application: routes, errors in OpenAI's form, and a true OpenAPI document."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt import __version__
from dflash_trt.errors import DflashError
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serve.keys import Keys
from dflash_trt.serve.loop import STOPPED, EngineLoop, Stopped
from dflash_trt.serve.openai.errors import Gone, Problem, as_problem
from dflash_trt.serve.openai.front import Front, Settings
from dflash_trt.serve.openai.gate import Gate
from dflash_trt.serve.openai.routes import about, generating
from dflash_trt.serve.openai.schema import ChatRequest, CompletionRequest

_FAILED = ("engine_failed", "stopped")  # of requests that had been taken; the engine loop counts these


def make_app(loop: EngineLoop, tokenizer: Tokenizer | None, settings: Settings, keys: Keys | None) -> FastAPI:
    """The OpenAI-compatible front of `loop`. Raises UserError for settings that make no sense."""
    front = Front(loop, tokenizer, settings, Gate(keys, settings.max_concurrent_per_key), ThreadPoolExecutor(1))

    async def refuse(http: Request, error: Exception) -> Response:
        if isinstance(error, Gone):
            return Response()  # nobody hears it
        problem = as_problem(error)
        if problem.code not in _FAILED and http.url.path.startswith("/v1/"):
            loop.metrics.refuse(problem.code)
        return problem.response

    app = FastAPI(
        title="dflash-trt",
        version=__version__,
        description="Speculative decoding with DFlash, behind OpenAI's API.",
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys((Problem, DflashError, HTTPException, Gone), refuse),
    )
    app.state.exchanges = front.exchanges
    app.add_middleware(_Shield, refuse=refuse)
    app.include_router(generating(front))
    app.include_router(about(front))
    _describe_bodies(app)
    return app


class _Shield:
    """Turns whatever nobody expected into an answer; the server beneath would log it with all it holds."""

    def __init__(self, app: ASGIApp, refuse: Any):
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (Exception, asyncio.CancelledError) as error:
            # A server that ends cancels what has not ended in time.
            known = Stopped(STOPPED) if isinstance(error, asyncio.CancelledError) else error
            response = await self._refuse(Request(scope), known)
            if not begun:
                await response(scope, receive, send)


def _describe_bodies(app: FastAPI) -> None:
    """Add what the routes refer to: FastAPI describes only bodies that it reads itself."""
    make = app.openapi
    _, schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )

    def openapi() -> dict[str, Any]:
        document = make()
        document["components"]["schemas"] |= schemas["$defs"]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own; ours are 400
        return document

    app.openapi = openapi  # type: ignore[method-assign]
