"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from scheduler.commands import AdapterInfo, LoadAdapter, UnloadAdapter
from server.body import read_body
from server.errors import BadRequest, UnknownAdapter
from server.operator_protocol import LoadAdapterBody, UnloadAdapterBody
from server.state import state_of

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load(request: Request) -> Response:
    """Under a name that is taken, other weights are a new version; requests under way end on the one they began with.
    The same weights again are an error, unless `load_inplace` says that they may be."""
    server = state_of(request)
    body = await read_body(request, LoadAdapterBody, server.settings)
    name = body.lora_name
    if server.models.is_base(name):
        raise BadRequest(f"Invalid 'lora_name': {name!r} is the base model.", param="lora_name", code="invalid_value")
    async with server.models.changing:
        info = await server.engine.command(LoadAdapter(name, body.lora_path), AdapterInfo)
        served = server.models.get(name)
        if served is not None and served.info.version == info.version:
            if not body.load_inplace:
                message = f"The lora adapter {name!r} has already been loaded."
                raise BadRequest(message, param="lora_name", code="adapter_already_loaded")
        else:
            server.models.add(info)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """New requests for it are refused, those under way end on it."""
    server = state_of(request)
    body = await read_body(request, UnloadAdapterBody, server.settings)
    name = body.lora_name
    async with server.models.changing:
        if server.models.get(name) is None:
            raise UnknownAdapter(name)
        server.models.remove(name)
        await server.engine.command(UnloadAdapter(name), AdapterInfo)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
