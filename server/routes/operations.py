"""What those who run the server ask it: /health, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
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
