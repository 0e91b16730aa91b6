"""What those who run the server ask it: /health, /metrics, /version, /load, /reset_prefix_cache."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler.commands import CacheEffect, CacheTarget, ChangeCache, Operation
from server.errors import BadRequest, json_response
from server.state import state_of
from server.version import VERSION

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine's thread lives, else 503."""
    if state_of(request).engine.alive:
        return json_response({"status": "ok"})
    return json_response({"status": "engine is not running"}, 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    content, content_type = state_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": VERSION})


@router.get("/load")
async def load(request: Request) -> Response:
    """vLLM's: the number of requests that are waiting or running."""
    return json_response({"server_load": state_of(request).engine.num_live})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """vLLM's: drop all that is cached, of every model and salt. Requests under way compute again what they lost."""
    for name in request.query_params:
        raise BadRequest(f"Unsupported field: {name!r} is not supported.", param=name, code="unsupported_parameter")
    everything = ChangeCache(Operation.DROP, CacheTarget(everything=True))
    await state_of(request).engine.command(everything, CacheEffect)
    return Response()
