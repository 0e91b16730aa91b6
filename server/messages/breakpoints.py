"""Where in the tokens of a prompt its cache breakpoints are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler.messages import PrefixPin
from server.body import validate
from server.errors import BadRequest
from server.messages.body import CountBody
from server.messages.conversation import Cut, chat_fields
from server.prepare import chat_prompt
from server.prompt import Prompt
from server.protocol import ChatBody
from server.state import ServerState

# Templates want a turn of the user's, and some leave out tools without one. Its text is like no other's.
SOMEBODY = {"role": "user", "content": "\N{OBJECT REPLACEMENT CHARACTER}"}


async def find_pins(server: ServerState, body: CountBody, cuts: Sequence[Cut], prompt: Prompt) -> tuple[PrefixPin, ...]:
    """How many leading tokens of `prompt` each cut of its conversation covers.

    What a cut conversation is spelled as agrees with the whole one up to the cut, and at most a few characters of the
    template beyond it.
    """
    pins = []
    for cut in cuts:
        part = await spell(server, body, cut.messages)
        tokens = len(prompt.token_ids) if part is None else common_prefix(part.token_ids, prompt.token_ids)
        pins.append(PrefixPin(tokens, cut.seconds))
    ordered = []
    reach = 0
    for pin in pins:  # a later one covers no less: what comes first in a body may be spelled later
        reach = max(reach, pin.tokens)
        ordered.append(replace(pin, tokens=reach))
    return tuple(ordered)


async def spell(server: ServerState, body: CountBody, messages: list[dict[str, Any]]) -> Prompt | None:
    """None if the template does not accept a conversation that ends there."""
    if not any(message["role"] == "user" for message in messages):
        messages = [*messages, SOMEBODY]
    fields = {**chat_fields(body, messages), "continue_final_message": False, "add_generation_prompt": False}
    try:
        return await chat_prompt(server, validate(fields, ChatBody))
    except BadRequest:
        return None


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
