"""From a body to what the engine would be handed: its prompts as ids, and how each goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import CacheControl, GenerationRequest, SamplingParams
from server.errors import BadRequest
from server.prompt import Prompt, room_for_output
from server.protocol import ChatBody, CompletionBody, GenerationBody
from server.sampling import sampling_params
from server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt of a body. `echo_only`: nothing is to be generated, but for the token that an engine always makes."""

    prompt: Prompt
    params: SamplingParams
    echo_only: bool = False


async def prepare_completion(server: ServerState, body: CompletionBody) -> list[Prepared]:
    """Raises ApiError."""
    server.models.adapter(body.model)  # an unknown one is refused before its prompt is looked at
    prompts = await server.encoder.prompts(body.prompt, echo=body.echo)
    refuse_shared_report(body, prompts)
    prepared = []
    for prompt in prompts:
        room = room_for_output(len(prompt.token_ids), body.wanted_tokens, DEFAULT_MAX_TOKENS, server.info, "prompt")
        prepared.append(Prepared(prompt, sampling_params(body, max(room, 1), server.info), echo_only=room == 0))
    return prepared


async def prepare_chat(server: ServerState, body: ChatBody) -> Prepared:
    """Raises ApiError."""
    server.models.adapter(body.model)
    prompt = await server.encoder.chat(body.messages)
    room = room_for_output(len(prompt.token_ids), body.wanted_tokens, None, server.info, "messages")
    return Prepared(prompt, sampling_params(body, room, server.info))


def refuse_shared_report(body: GenerationBody, prompts: Sequence[Prompt]) -> None:
    if body.cache_report and len(prompts) > 1:
        message = f"Invalid 'cache_report': it is of one prompt, and there are {len(prompts)}."
        raise BadRequest(message, param="cache_report", code="invalid_value")


def engine_request(
    server: ServerState, body: GenerationBody, prepared: Prepared, request_id: str, *, report: bool = False
) -> GenerationRequest:
    """What the engine gets, to be handed over before anything else is awaited. Raises UnknownModel.

    A prompt whose tokens are scored must be computed, so it opts out of reading.
    """
    cache = body.cache
    scored = prepared.params.prompt_logprobs is not None
    return GenerationRequest(
        request_id,
        prepared.prompt.token_ids,
        prepared.params,
        body.priority,
        cache_salt=body.cache_salt,
        adapter=server.models.adapter(body.model),
        cache=CacheControl(read=cache.read and not scored, write=cache.write, ttl=cache.ttl, pin=cache.pin),
        report=report,
    )
