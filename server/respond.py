"""The common end of every generating route: hand the prompts to the engine, answer whole or as a stream."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from scheduler.messages import GenerationRequest
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

QUICK_FAILURE = 0.1  # seconds

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

    A stream sends its headers at once: it only waits QUICK_FAILURE, so that a request which the engine refuses right
    away is answered with a status. Later errors are events of the stream. Raises ClientDisconnected and ApiError.
    """
    requests, choices = expand(server, body, answer.id, prepared, continues)
    generation = Generation(server.engine, requests, choices)
    try:
        if body.stream:
            await until_disconnect(request.receive, generation.begin(QUICK_FAILURE))
            return EventStream(generation, answer, wire, server.settings.sse_ping)
        await until_disconnect(request.receive, generation.run())
    except BaseException:
        generation.close()
        raise
    return json_response(answer.whole(choices))


def expand(
    server: ServerState, body: GenerationBody, answer_id: str, prepared: Sequence[Prepared], continues: bool
) -> tuple[list[GenerationRequest], list[Choice]]:
    """What the engine is asked, and a Choice for each: `n` of every prompt, one prompt after the other. The others of
    a prompt come after its first, which computes the prompt; a report is of the first."""
    report = body.cache_report or log.isEnabledFor(logging.DEBUG)
    # A client's name for its answer may be in use: two answers of one name are two requests.
    name = answer_id if body.request_id is None else f"{answer_id}-{secrets.token_hex(4)}"
    requests: list[GenerationRequest] = []
    choices: list[Choice] = []
    for each in prepared:
        first, after = None, None
        for number in range(body.n):
            request_id = f"{name}-{len(requests)}"
            request = engine_request(
                server, body, each, request_id, report=report and first is None, choice=number, after=after
            )
            choice = make_choice(server, body, each, continues, first)
            if first is None:
                first, after = choice, request_id
            requests.append(request)
            choices.append(choice)
    return requests, choices


def make_choice(
    server: ServerState, body: GenerationBody, prepared: Prepared, continues: bool, first: Choice | None = None
) -> Choice:
    shown = server.tags.shown(is_guided=prepared.grammar is not None, may_call=prepared.tools is not None)
    # What a client's grammar holds is the text with its first space.
    keeps_space = continues or (prepared.grammar is not None and prepared.tools is None)
    detokenizer = Detokenizer(
        server.tokenizer, skip_special_tokens=body.skip_special_tokens, shown=shown, after_prompt=keeps_space
    )
    return Choice(
        detokenizer,
        prepared.params,
        frozenset(server.info.eos_token_ids),
        body.stop,
        body.include_stop_str_in_output,
        echo=prepared.prompt.echo,
        echo_only=prepared.echo_only,
        first=first,
        tools=None if prepared.tools is None else prepared.tools.reading(server.tool_format, eager=body.stream),
    )
