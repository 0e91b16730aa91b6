"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [describe(state_of(request))]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    server = state_of(request)
    server.check_model(name)
    return json_response(describe(server))


def describe(server: ServerState) -> dict[str, Any]:
    return {
        "id": server.settings.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "pagekv",
        "max_model_len": server.info.max_model_len,
    }
