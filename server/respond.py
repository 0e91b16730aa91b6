"""The common end of every generating route: hand the prompts to the engine, answer whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from server.answers import Format
from server.choice import Choice
from server.connection import EventStream, until_disconnect
from server.detokenizer import Detokenizer
from server.errors import json_response
from server.generation import Generation
from server.prepare import Prepared, engine_request
from server.protocol import GenerationBody
from server.state import ServerState
from server.wire import DATA_WIRE, Wire

log = logging.getLogger("pagekv")


async def respond(
    request: Request,
    server: ServerState,
    body: GenerationBody,
    answer: Format,
    prepared: Sequence[Prepared],
    *,
    continues: bool,
    wire: Wire = DATA_WIRE,
) -> Response:
    """One choice for each prompt, whose text it `continues`, or else answers with a text of its own.

    Raises ClientDisconnected, and ApiError until the first output is there; later errors go into the stream.
    """
    report = body.cache_report or log.isEnabledFor(logging.DEBUG)
    requests = [
        engine_request(server, body, each, f"{answer.id}-{index}", report=report) for index, each in enumerate(prepared)
    ]
    choices = [make_choice(server, body, each, continues) for each in prepared]
    generation = Generation(server.engine, requests, choices)
    try:
        if body.stream:
            first = await until_disconnect(request.receive, generation.next())
            return EventStream(generation, answer, first, wire)
        await until_disconnect(request.receive, generation.run())
    except BaseException:
        generation.close()
        raise
    return json_response(answer.whole(choices))


def make_choice(server: ServerState, body: GenerationBody, prepared: Prepared, continues: bool) -> Choice:
    return Choice(
        Detokenizer(server.tokenizer, after_prompt=continues),
        prepared.params,
        frozenset(server.info.eos_token_ids),
        body.stop,
        body.include_stop_str_in_output,
        echo=prepared.prompt.echo,
        echo_only=prepared.echo_only,
    )
