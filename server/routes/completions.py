"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answers import CompletionFormat
from server.body import read_body
from server.prompt import room_for_output
from server.protocol import CompletionBody
from server.respond import respond
from server.sampling import sampling_params
from server.state import state_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    server = state_of(request)
    body = await read_body(request, CompletionBody, server.settings.max_body_bytes)
    server.check_model(body.model)
    prompts = await server.encoder.completion(body)
    params = [
        sampling_params(
            body, room_for_output(len(ids), body.wanted_tokens, DEFAULT_MAX_TOKENS, server.info, "prompt"), server.info
        )
        for ids in prompts
    ]
    answer = CompletionFormat(
        server.settings.model_name,
        server.tokenizer,
        logprobs=body.logprobs_wanted is not None,
        include_usage=body.include_usage,
    )
    return await respond(request, server, body, answer, prompts, params, continues=True)
