"""POST /v1/cache/drop, /v1/cache/invalidate and /v1/cache/plan: what operators do to a running cache, and ask of it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler.commands import CacheEffect, CacheTarget, ChangeCache, Operation, PlanPrompt
from scheduler.messages import CacheReport
from server.body import beside_loop, read_body, read_object, validate
from server.connection import until_disconnect
from server.errors import BadRequest, json_response
from server.operator_protocol import CacheTargetBody
from server.prepare import engine_request, prepare_chat, prepare_completion
from server.prompt import Chat
from server.protocol import ChatBody, CompletionBody
from server.reports import report_json
from server.state import ServerState, state_of

router = APIRouter()


@router.post("/v1/cache/drop")
async def drop(request: Request) -> Response:
    """The bytes are gone; all else about the blocks stands."""
    return await change(request, Operation.DROP)


@router.post("/v1/cache/invalidate")
async def invalidate(request: Request) -> Response:
    """The blocks are no longer true: forgotten, with all that was computed upon them."""
    return await change(request, Operation.INVALIDATE)


async def change(request: Request, operation: Operation) -> Response:
    server = state_of(request)
    body = await read_body(request, CacheTargetBody, server.settings)
    target = await until_disconnect(request.receive, target_of(server, body))
    effect = await server.engine.command(ChangeCache(operation, target), CacheEffect)
    return json_response({"blocks": effect.blocks, "bytes": effect.bytes, "by_tier": effect.by_tier})


async def target_of(server: ServerState, body: CacheTargetBody) -> CacheTarget:
    if not body.is_prompt:
        return CacheTarget(
            block_hash=body.block_hash,
            adapter=body.adapter,
            cache_salt=body.cache_salt,
            everything=bool(body.all),
        )
    adapter = server.models.adapter(body.model)
    if body.messages is not None:
        prompt = await server.encoder.chat(Chat(body.messages))
    else:
        prompt = await server.encoder.one_prompt(body.prompt)
    return CacheTarget(
        prompt=prompt.token_ids,
        blocks=None if body.blocks is None else tuple(body.blocks),
        adapter=adapter,
        cache_salt=body.cache_salt,
    )


@router.post("/v1/cache/plan")
async def plan(request: Request) -> Response:
    """What a completion or chat request with this body would compute, were it sent now."""
    server = state_of(request)
    data = await read_object(request, server.settings)
    body: CompletionBody | ChatBody
    if data.get("messages") is not None:
        body = await beside_loop(request, lambda: validate(data, ChatBody))
        prepared = await until_disconnect(request.receive, prepare_chat(server, body))
    else:
        body = await beside_loop(request, lambda: validate(data, CompletionBody))
        prepared, *others = await until_disconnect(request.receive, prepare_completion(server, body))
        if others:
            message = f"Invalid 'prompt': a plan is of one prompt, not {len(others) + 1}."
            raise BadRequest(message, param="prompt", code="too_many_prompts")
    asked = engine_request(server, body, prepared, "plan")
    report = await server.engine.command(PlanPrompt(asked, server.settings.reveal_cached_tokens), CacheReport)
    return json_response(report_json(report))
