"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import beside_loop, read_body, validate
from server.connection import until_disconnect
from server.errors import json_response
from server.messages.body import CountBody, MessagesBody
from server.messages.breakpoints import find_pins
from server.messages.conversation import RENAMINGS, Conversation, chat_fields, generation_fields
from server.messages.format import MessagesFormat
from server.prepare import chat_of, prepare_chat
from server.protocol import ChatBody
from server.renaming import named_as
from server.respond import respond
from server.state import state_of

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, MessagesBody, server.settings)
    conversation = await beside_loop(request, lambda: Conversation(body))
    with named_as(RENAMINGS):
        fields = {**chat_fields(body, conversation.messages), **generation_fields(body)}
        chat = await beside_loop(request, lambda: validate(fields, ChatBody))
        prepared = await until_disconnect(request.receive, prepare_chat(server, chat))
    pins = await until_disconnect(request.receive, find_pins(server, body, conversation.cuts, prepared.prompt))
    prepared = replace(prepared, prefix_pins=pins, echo_only=body.max_tokens == 0)
    answer = MessagesFormat(body.model, pins)
    return await respond(request, server, chat, answer, [prepared], continues=chat.continue_final_message, wire=answer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Of the prompt that the same body makes, whether or not the model has room for it."""
    server = state_of(request)
    body = await read_body(request, CountBody, server.settings)
    server.models.adapter(body.model)
    with named_as(RENAMINGS):
        fields = await beside_loop(request, lambda: chat_fields(body, Conversation(body).messages))
        chat = await beside_loop(request, lambda: validate(fields, ChatBody))
        count = await until_disconnect(request.receive, server.encoder.count(chat_of(chat)))
    return json_response({"input_tokens": count})
