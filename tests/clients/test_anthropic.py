"""The official Python client of Anthropic's API: messages whole and streamed, counting, breakpoints, errors."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from anthropic import Anthropic

from tests.server.real import RealServer

MODEL = "tiny"
ASK = [{"role": "user", "content": "Is there land ahead?"}]
GREEDY = {"temperature": 0}  # a field that this client has given up
SYSTEM = "You are the lookout of a ship. You call out what you see, and no more than that. " * 2


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message(client: Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=12, messages=ASK, extra_body=GREEDY)
    assert message.role == "assistant" and message.stop_reason in ("end_turn", "max_tokens")
    assert message.content[0].type == "text" and message.content[0].text
    assert 0 < message.usage.output_tokens <= 12


def test_a_stream_is_the_whole_message_in_pieces(client: Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=24, messages=ASK, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=24, messages=ASK, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text" and text == whole.content[0].text
    assert final.content[0].type == "text" and final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_sequences(client: Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=ASK, extra_body=GREEDY)
    assert whole.content[0].type == "text"
    stop = whole.content[0].text[3:5]
    message = client.messages.create(model=MODEL, max_tokens=16, messages=ASK, extra_body=GREEDY, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_count_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system=SYSTEM)
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=ASK, system=SYSTEM).usage
    assert usage.cache_read_input_tokens is not None and usage.cache_creation_input_tokens is not None
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted.input_tokens == total


def test_a_breakpoint_is_created_then_read(client: Anthropic) -> None:
    rules = "The rules of the watch, which every hand knows by heart and says again at every bell. " * 2
    system = [{"type": "text", "text": rules, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first, second = (
        client.messages.create(
            model=MODEL, max_tokens=4, system=system, messages=[{"role": "user", "content": text}]
        ).usage
        for text in ("Larboard?", "Starboard?")
    )
    assert first.cache_creation_input_tokens and not second.cache_creation_input_tokens
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert second.input_tokens < 20


STEER = {
    "name": "steer",
    "description": "Change the course.",
    "input_schema": {
        "type": "object",
        "properties": {"heading": {"enum": ["north", "south"]}},
        "required": ["heading"],
        "additionalProperties": False,
    },
}


def test_a_tool_is_called_and_its_result_goes_back(client: Anthropic) -> None:
    body = {"model": MODEL, "tools": [STEER], "max_tokens": 200}
    message = client.messages.create(messages=ASK, tool_choice={"type": "tool", "name": "steer"}, **body)
    (call,) = message.content
    assert call.type == "tool_use" and call.name == "steer" and call.input["heading"] in ("north", "south")
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Steady."}]}
    turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **body | {"max_tokens": 4})
    assert [block.type for block in after.content] == ["text"]
    with client.messages.stream(messages=ASK, tool_choice={"type": "any"}, **body) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and final.content[0].input["heading"] in ("north", "south")


def test_errors_are_exceptions_that_name_the_field(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="thinking.type"):
        client.messages.create(model=MODEL, max_tokens=2048, messages=ASK, thinking={"type": "deep"})
