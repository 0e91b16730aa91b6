"""The common end of every generating route: hand the prompts to the engine, answer whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from scheduler.messages import GenerationRequest, SamplingParams
from server.answers import Format
from server.choice import Choice
from server.connection import EventStream, until_disconnect
from server.detokenizer import Detokenizer
from server.errors import ClientDisconnected, json_response
from server.generation import Generation
from server.protocol import GenerationBody
from server.state import ServerState

CLIENT_CLOSED_REQUEST = 499  # nginx's status for an answer that nobody reads


async def respond(
    request: Request,
    server: ServerState,
    body: GenerationBody,
    answer: Format,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    *,
    continues: bool,
) -> Response:
    """One choice for each prompt, whose text it `continues`, or else answers with a text of its own.

    Raises ApiError until the first output is there; later errors go into the stream.
    """
    requests = [
        GenerationRequest(f"{answer.id}-{index}", prompt, params[index], body.priority)
        for index, prompt in enumerate(prompts)
    ]
    choices = [make_choice(server, body, each, continues) for each in params]
    generation = Generation(server.engine, requests, choices)
    try:
        if body.stream:
            first = await until_disconnect(request.receive, generation.next())
            return EventStream(generation, answer, first)
        await until_disconnect(request.receive, generation.run())
    except ClientDisconnected:
        generation.close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        generation.close()
        raise
    return json_response(answer.whole(choices))


def make_choice(server: ServerState, body: GenerationBody, params: SamplingParams, continues: bool) -> Choice:
    return Choice(
        Detokenizer(server.tokenizer, after_prompt=continues),
        params,
        frozenset(server.info.eos_token_ids),
        body.stop,
        body.include_stop_str_in_output,
    )
