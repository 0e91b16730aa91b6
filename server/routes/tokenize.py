"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import beside_loop, read_body, read_object, validate
from server.connection import until_disconnect
from server.errors import json_response
from server.prepare import chat_of
from server.protocol import ChatBody
from server.state import ServerState, state_of
from server.tokenize_protocol import OWN_FIELDS, DetokenizeBody, TokenizeBody, TokenizeChatBody

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The ids of a text, as a completion would begin with them, or of a conversation, as a chat completion would."""
    server = state_of(request)
    data = await read_object(request, server.settings)
    if data.get("messages") is not None:
        conversation = await beside_loop(request, lambda: validate(data, TokenizeChatBody))
        server.models.adapter(conversation.model)
        of_chat = {name: value for name, value in data.items() if name not in OWN_FIELDS}
        chat = await beside_loop(request, lambda: validate(of_chat, ChatBody))
        spelling = server.encoder.chat_json(chat_of(chat), with_names=conversation.return_token_strs)
        return tokenized(server, await until_disconnect(request.receive, spelling))
    body = validate(data, TokenizeBody)
    server.models.adapter(body.model)
    encoding = server.encoder.tokens_json(
        body.prompt, add_special_tokens=body.add_special_tokens, with_names=body.return_token_strs
    )
    return tokenized(server, await until_disconnect(request.receive, encoding))


def tokenized(server: ServerState, members: bytes) -> Response:
    """`members` are JSON already: a list of millions would take the event loop long to write."""
    return Response(b'{"max_model_len":%d,%b}' % (server.info.max_model_len, members), media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, DetokenizeBody, server.settings)
    server.models.adapter(body.model)
    return json_response({"prompt": await server.encoder.decode(body.tokens, "tokens")})
