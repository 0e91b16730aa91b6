"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answers import ChatFormat, Extras
from server.body import read_body
from server.connection import until_disconnect
from server.prepare import prepare_chat
from server.protocol import ChatBody
from server.respond import respond
from server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, ChatBody, server.settings)
    prepared = await until_disconnect(request.receive, prepare_chat(server, body))
    answer = ChatFormat(server.models.name_of(body.model), server.tokenizer, Extras.of(body, [prepared]))
    return await respond(request, server, body, answer, [prepared], continues=body.continue_final_message)
