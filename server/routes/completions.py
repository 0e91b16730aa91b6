"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answers import CompletionFormat, Extras
from server.body import read_body
from server.connection import until_disconnect
from server.prepare import prepare_completion
from server.protocol import CompletionBody
from server.respond import respond
from server.state import state_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, CompletionBody, server.settings)
    prepared = await until_disconnect(request.receive, prepare_completion(server, body))
    answer = CompletionFormat(server.models.name_of(body.model), server.tokenizer, Extras.of(body, prepared))
    return await respond(request, server, body, answer, prepared, continues=True)
