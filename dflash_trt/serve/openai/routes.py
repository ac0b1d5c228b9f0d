"""The addresses of a server."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, Request, Response

from dflash_trt.serve.metrics import CONTENT_TYPE
from dflash_trt.serve.openai.errors import Problem, documented
from dflash_trt.serve.openai.exchange import respond
from dflash_trt.serve.openai.front import Front
from dflash_trt.serve.openai.prepare import prepare_chat, prepare_completion
from dflash_trt.serve.openai.replies import ChatCompletion, Completion, Health, Model, ModelList

_AFTER = "5"  # seconds after which to ask for a server's health again


def generating(front: Front) -> APIRouter:
    """What the engine answers. Bodies are read by `exchange.respond`, so that limits hold while they arrive."""
    router = APIRouter(dependencies=front.gate.documented)
    errors = documented(400, 401, 404, 408, 413, 429, 500, 503)

    @router.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        summary="Continue a conversation",
        response_model=None,
        responses={200: _either(ChatCompletion), **errors},
        openapi_extra=_body("ChatRequest"),
    )
    async def chat(http: Request, key: str = Depends(front.gate)) -> Response:
        return await respond(front, http, key, prepare_chat)

    @router.post(
        "/v1/completions",
        operation_id="create_completion",
        summary="Continue a text",
        response_model=None,
        responses={200: _either(Completion), **errors},
        openapi_extra=_body("CompletionRequest"),
    )
    async def completions(http: Request, key: str = Depends(front.gate)) -> Response:
        return await respond(front, http, key, prepare_completion)

    return router


def about(front: Front) -> APIRouter:
    """What the server says of itself."""
    router = APIRouter()
    guarded = [*front.gate.documented, Depends(front.gate)]
    model: Model = {
        "id": front.settings.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-trt",
        "max_model_len": front.loop.limits.max_seq_len,
    }

    @router.get(
        "/v1/models",
        operation_id="list_models",
        summary="The served model",
        dependencies=guarded,
        responses=documented(401),
    )
    async def models() -> ModelList:
        return {"object": "list", "data": [model]}

    @router.get(
        "/v1/models/{name:path}",
        operation_id="retrieve_model",
        summary="One model",
        dependencies=guarded,
        responses=documented(401, 404),
    )
    async def one_model(name: str) -> Model:
        if name != front.settings.model:
            message = f"there is no model {name[:100]!r} — URL — this server has {front.settings.model}"
            raise Problem(404, "model_not_found", message, param="model")
        return model

    @router.get("/health", operation_id="health", summary="Whether requests are taken", responses=documented(500, 503))
    async def health() -> Health:
        match front.loop.state:
            case "ready":
                return {"status": "ready"}
            case "broken":
                raise Problem(500, "engine_broken", f"the engine failed: {front.loop.fault}")
            case state:
                message = f"the server is {state} — server — try again later"
                raise Problem(503, state, message, headers={"Retry-After": _AFTER})

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="For Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(front.loop.metrics.text(), media_type=CONTENT_TYPE)

    return router


def _either(model: type) -> dict[str, object]:
    """The documentation of an answer that comes whole or as a stream."""
    stream = {"schema": {"type": "string", "description": "Chunks, the last of them [DONE]; an error ends it early."}}
    return {"model": model, "description": "The answer.", "content": {"text/event-stream": stream}}


def _body(name: str) -> dict[str, object]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
