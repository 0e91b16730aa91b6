"""POST /v1/responses: OpenAI's newer API, without its memory of earlier answers."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import beside_loop, read_body, validate
from server.connection import until_disconnect
from server.prepare import prepare_chat
from server.protocol import ChatBody
from server.renaming import named_as
from server.respond import respond
from server.responses.body import ResponsesBody
from server.responses.conversation import RENAMINGS, chat_fields
from server.responses.format import ResponsesFormat
from server.state import state_of

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, ResponsesBody, server.settings)
    with named_as(RENAMINGS):
        chat = await beside_loop(request, lambda: validate(chat_fields(body), ChatBody))
        prepared = await until_disconnect(request.receive, prepare_chat(server, chat))
    answer = ResponsesFormat(server.models.name_of(body.model), body, server.tokenizer, server.info.sampling)
    return await respond(request, server, chat, answer, [prepared], continues=False, wire=answer)
