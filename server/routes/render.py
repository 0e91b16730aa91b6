"""POST /v1/completions/render and /v1/chat/completions/render: the token ids that the engine would be given."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.connection import until_disconnect
from server.errors import json_response
from server.prepare import prepare_chat, prepare_completion
from server.protocol import ChatBody, CompletionBody
from server.state import state_of

router = APIRouter()


@router.post("/v1/completions/render")
async def render_completion(request: Request) -> Response:
    """A list, with an object for each prompt of the body. What the completion would refuse is refused."""
    server = state_of(request)
    body = await read_body(request, CompletionBody, server.settings)
    prepared = await until_disconnect(request.receive, prepare_completion(server, body))
    model = server.models.name_of(body.model)
    return json_response([{"model": model, "token_ids": each.prompt.token_ids} for each in prepared])


@router.post("/v1/chat/completions/render")
async def render_chat_completion(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, ChatBody, server.settings)
    prepared = await until_disconnect(request.receive, prepare_chat(server, body))
    return json_response({"model": server.models.name_of(body.model), "token_ids": prepared.prompt.token_ids})
