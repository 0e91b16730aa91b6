"""GET /v1/models and /v1/models/{id}: the base model, and each adapter as a model of its own."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.served import ServedAdapter
from server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    server = state_of(request)
    adapters = [describe_adapter(server, adapter) for adapter in server.models]
    return json_response({"object": "list", "data": [describe_base(server), *adapters]})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    server = state_of(request)
    server.models.adapter(name)
    adapter = server.models.get(name)
    return json_response(describe_base(server) if adapter is None else describe_adapter(server, adapter))


def describe_base(server: ServerState) -> dict[str, Any]:
    return describe(server, server.models.base, server.models.created, server.info.model_path, None)


def describe_adapter(server: ServerState, adapter: ServedAdapter) -> dict[str, Any]:
    return describe(server, adapter.info.name, adapter.created, adapter.info.path, server.models.base)


def describe(server: ServerState, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    """vLLM's card: `root` is where the weights are, `parent` the model that an adapter is over."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pagekv",
        "root": root,
        "parent": parent,
        "max_model_len": server.info.max_model_len,
    }
