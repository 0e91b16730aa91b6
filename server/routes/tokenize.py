"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body, read_object, validate
from server.errors import json_response
from server.prepare import chat_prompt
from server.protocol import ChatBody
from server.state import ServerState, state_of
from server.tokenize_protocol import OWN_FIELDS, DetokenizeBody, TokenizeBody, TokenizeChatBody

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The ids of a text, as a completion would begin with them, or of a conversation, as a chat completion would."""
    server = state_of(request)
    data = await read_object(request, server.settings)
    token_ids: Sequence[int]
    if data.get("messages") is not None:
        conversation = validate(data, TokenizeChatBody)
        server.models.adapter(conversation.model)
        chat = validate({name: value for name, value in data.items() if name not in OWN_FIELDS}, ChatBody)
        token_ids = (await chat_prompt(server, chat, bounded=False)).token_ids
        return tokenized(server, token_ids, conversation.return_token_strs)
    body = validate(data, TokenizeBody)
    server.models.adapter(body.model)
    token_ids = await server.encoder.text(body.prompt, body.add_special_tokens)
    return tokenized(server, token_ids, body.return_token_strs)


def tokenized(server: ServerState, token_ids: Sequence[int], with_tokens: bool) -> Response:
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": server.info.max_model_len,
            "tokens": token_ids,
            "token_strs": [server.tokenizer.token_name(token_id) for token_id in token_ids] if with_tokens else None,
        }
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, DetokenizeBody, server.settings)
    server.models.adapter(body.model)
    return json_response({"prompt": await server.encoder.decode(body.tokens, "tokens")})
