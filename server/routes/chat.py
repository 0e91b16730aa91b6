"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answers import ChatFormat
from server.body import read_body
from server.prompt import room_for_output
from server.protocol import ChatBody
from server.respond import respond
from server.sampling import sampling_params
from server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, ChatBody, server.settings.max_body_bytes)
    server.check_model(body.model)
    ids = await server.encoder.chat(body)
    max_tokens = room_for_output(len(ids), body.wanted_tokens, None, server.info, "messages")
    params = sampling_params(body, max_tokens, server.info)
    answer = ChatFormat(
        server.settings.model_name,
        server.tokenizer,
        logprobs=body.logprobs,
        include_usage=body.include_usage,
    )
    return await respond(request, server, body, answer, [ids], [params], continues=False)
