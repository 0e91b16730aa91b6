"""/v1/messages: Anthropic's shapes, whole and as events, and breakpoints that pin what they cover."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.body import parse_body
from server.messages.body import MessagesBody, ToolUseBlock
from server.messages.conversation import Conversation, chat_fields
from tests.server.fake_engine import EOS, say
from tests.server.harness import Running, serve, small
from tests.server.real import RealServer, save_chat_model, serve_real

SWITCHED = {"type": "object", "properties": {"to": {"enum": ["on", "off"]}}}
HI = {"model": "toy", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve() as running:
        yield running


def ask(server: Running, **changes: Any) -> Any:
    response = server.post("/v1/messages", HI | changes)
    assert response.status_code == 200, response.text
    return response.json()


def asked(server: Running) -> str:
    """The text of the prompt that the engine got last."""
    return bytes(server.engine.submitted[-1].prompt_token_ids).decode()


def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = []
    with httpx.stream("POST", url + "/v1/messages", json=body | {"stream": True}, timeout=20) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        text = "".join(stream.iter_text())
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message(server: Running) -> None:
    got = ask(server)
    assert got.pop("id").startswith("msg_")
    assert got == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_read_input_tokens": 9,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 6,
            "service_tier": "standard",
        },
    }


def test_why_it_ended(server: Running) -> None:
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["x", "lo"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"] == [{"type": "text", "text": "hel"}]


def test_events(server: Running) -> None:
    start, ping, opened, *deltas, closed, end, stop = events_of(server.url, HI)
    assert start["type"] == "message_start" and ping == {"type": "ping"}
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (10, 0)
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert all(each["type"] == "content_block_delta" and each["index"] == 0 for each in deltas)
    assert "".join(each["delta"]["text"] for each in deltas) == "hello"
    assert closed == {"type": "content_block_stop", "index": 0}
    assert end["type"] == "message_delta" and end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 6 and end["usage"]["cache_read_input_tokens"] == 9
    assert stop == {"type": "message_stop"}


def test_an_answer_without_text_has_no_blocks() -> None:
    with serve(script=lambda _: [EOS]) as server:
        assert ask(server)["content"] == []
        kinds = [each["type"] for each in events_of(server.url, HI)]
        assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_turns_become_the_templates_messages(server: Running) -> None:
    ask(
        server,
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert asked(server) == "<system>be\nkind<user>a\nb<assistant>c<user>d<assistant>"
    ask(server, system="x")
    assert asked(server) == "<system>x<user>hi<assistant>"


def test_how_to_sample(server: Running) -> None:
    ask(server, temperature=0.5, top_p=0.25, top_k=7, metadata={"user_id": "u"}, cache_salt="s")
    request = server.engine.submitted[-1]
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.5, 0.25, 7)
    assert request.cache_salt == "s"


def test_nothing_is_generated_with_max_tokens_of_zero(server: Running) -> None:
    got = ask(server, max_tokens=0)
    assert (got["content"], got["stop_reason"], got["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_count_tokens(server: Running) -> None:
    body = {"model": "toy", "messages": HI["messages"], "system": "x"}
    assert server.post("/v1/messages/count_tokens", body).json() == {"input_tokens": 28}
    assert "max_tokens" in server.post("/v1/messages/count_tokens", HI).json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"model": None}, "'model' is required"),
        ({"messages": []}, "'messages'"),
        ({"container": "c"}, "'container' is not supported"),
        ({"mcp_servers": []}, "'mcp_servers' is not supported"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text' is required"),
        ({"messages": [{"role": "user", "content": [5]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": "rude"}]}, "be polite"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'cache_control.ttl'"),
        ({"cache_control": {"type": "forever"}}, "'cache_control.type'"),
        ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content'"),
        ({"messages": [{"role": "assistant", "content": []}]}, "'messages[0].content'"),
        ({"messages": [*HI["messages"], {"role": "assistant", "content": ""}]}, "'messages'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"x-guidance": {}}}}},
            "'output_config.format.schema'",
        ),
        ({"tools": [{"name": "f", "input_schema": {"x-guidance": {}}, "strict": True}]}, "'tools[0].input_schema'"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "'tools[1].name'"),
        (
            {"tool_choice": {"type": "any"}, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'tool_choice'",
        ),
    ],
)
def test_what_is_refused(server: Running, changes: dict[str, Any], named: str) -> None:
    response = server.post("/v1/messages", HI | changes)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]


def test_other_errors_have_the_same_shape(server: Running) -> None:
    missing = server.post("/v1/messages", HI | {"model": "nobody"})
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    wrong = httpx.get(server.url + "/v1/messages")
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"
    long = server.post("/v1/messages", HI | {"max_tokens": 600})
    assert long.status_code == 400 and "512" in long.json()["error"]["message"]


def test_an_error_after_the_start_is_an_event() -> None:
    with serve(fail_at=lambda _: 2) as server:
        assert server.post("/v1/messages", HI).json()["error"]["type"] == "api_error"
        last = events_of(server.url, HI)[-1]
        assert last["type"] == "error" and "the step failed" in last["error"]["message"]


# -- tools ------------------------------------------------------------------------------------------------------------

WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller() -> Iterator[Running]:
    with serve(script=say(f"Let me see. {CALL}"), info=small(4096)) as running:
        yield running


def test_a_call(caller: Running) -> None:
    got = ask(caller, tools=[WEATHER], max_tokens=200)
    said, call = got["content"]
    assert said["type"] == "text" and said["text"].strip() == "Let me see."
    assert call.pop("id") and call == {"type": "tool_use", "name": "weather", "input": {"town": "Oslo"}}
    assert got["stop_reason"] == "tool_use"


def test_a_call_as_events(caller: Running) -> None:
    events = events_of(caller.url, HI | {"tools": [WEATHER], "max_tokens": 200})
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == ["text", "tool_use"]
    assert starts[1]["content_block"]["name"] == "weather" and starts[1]["content_block"]["input"] == {}
    deltas = [each for each in events if each["type"] == "content_block_delta" and each["index"] == 1]
    assert json.loads("".join(each["delta"]["partial_json"] for each in deltas)) == {"town": "Oslo"}
    stops = [each["index"] for each in events if each["type"] == "content_block_stop"]
    assert stops == [0, 1] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_a_stop_sequence_cuts_off_is_not_one_to_be_made(caller: Running) -> None:
    """Its arguments are no JSON, and the reason is the stop sequence."""
    body = {"tools": [WEATHER], "max_tokens": 200, "stop_sequences": ["slo"]}
    for stop in (ask(caller, **body), events_of(caller.url, HI | body)[-2]["delta"]):
        assert (stop["stop_reason"], stop["stop_sequence"]) == ("stop_sequence", "slo")
    whole = ask(caller, **body | {"stop_sequences": ["</tool"]})
    assert whole["stop_reason"] == "tool_use" and whole["content"][1]["input"] == {"town": "Oslo"}


def test_the_nulls_of_a_calls_input_are_its_own() -> None:
    block = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"town": None}}
    body = HI | {"messages": [*HI["messages"], {"role": "assistant", "content": [block]}, *HI["messages"]]}
    (kept,) = parse_body(json.dumps(body).encode(), MessagesBody).messages[1].content
    assert isinstance(kept, ToolUseBlock) and kept.input == {"town": None}


def test_what_a_tool_gave_comes_before_what_the_user_says() -> None:
    body = MessagesBody.model_validate(
        {
            "model": "toy",
            "max_tokens": 1,
            "tools": [WEATHER | {"cache_control": MARK}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [text("wait"), {"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny", "cache_control": MARK},
                        text("so?"),
                    ],
                },
            ],
        }
    )
    conversation = Conversation(body)
    user, assistant, result, more = conversation.messages
    assert user == {"role": "user", "content": [text("hi")]} and more == {"role": "user", "content": [text("so?")]}
    assert assistant["content"] == [text("wait")]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
    assert assistant["tool_calls"] == [call]
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "sunny"}
    assert [len(cut.messages) for cut in conversation.cuts] == [0, 3]
    fields = chat_fields(body, conversation.messages)
    assert fields["tool_choice"] == "required" and fields["parallel_tool_calls"] is False
    assert fields["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]


def test_a_tool_that_must_be_called_is_called(real: RealServer) -> None:
    """Whatever a network of random weights would say."""
    body = {"model": "tiny", "max_tokens": 200, "messages": HI["messages"], "tools": [SWITCH]}
    got = real.post("/v1/messages", tool_choice={"type": "tool", "name": "switch"}, **body)
    (call,) = got["content"]
    assert call["name"] == "switch" and call["input"] in ({"to": "on"}, {"to": "off"})
    assert got["stop_reason"] == "tool_use"


SWITCH = {"name": "switch", "input_schema": {**SWITCHED, "required": ["to"], "additionalProperties": False}}


def test_an_answer_of_a_schema(real: RealServer) -> None:
    shape = {**SWITCHED, "required": ["to"], "additionalProperties": False}
    body = {"model": "tiny", "max_tokens": 200, "messages": HI["messages"]}
    got = real.post("/v1/messages", output_config={"format": {"type": "json_schema", "schema": shape}}, **body)
    assert json.loads(got["content"][0]["text"]) in ({"to": "on"}, {"to": "off"})


# -- breakpoints, over a real engine -----------------------------------------------------------------------------------

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path, max_model_len=2048)
    with serve_real(path) as running:
        yield running


def text(value: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": value} | ({} if mark is None else {"cache_control": mark})


def usage_of(real: RealServer, **body: Any) -> tuple[int, int, int]:
    """Read, created, other."""
    usage = real.post("/v1/messages", model="tiny", max_tokens=1, **body)["usage"]
    created = usage["cache_creation_input_tokens"]
    assert created == sum(usage["cache_creation"].values())
    return usage["cache_read_input_tokens"], created, usage["input_tokens"]


def count(real: RealServer, **body: Any) -> int:
    return int(real.post("/v1/messages/count_tokens", model="tiny", **body)["input_tokens"])


def pinned(real: RealServer) -> int:
    lines = httpx.get(real.url + "/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("pagekv_pinned_blocks{")).rsplit(" ", 1)[1]))


def test_what_the_model_has_no_room_for_is_counted_all_the_same(real: RealServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "ab " * 20_000}]}
    assert count(real, **body) == real.post("/tokenize", **body)["count"] > 20_000
    refused = httpx.post(real.url + "/v1/messages", json={"model": "tiny", "max_tokens": 1} | body, timeout=60)
    assert refused.status_code == 400 and "at least" in refused.json()["error"]["message"], "and not encoded"


def test_what_a_breakpoint_covers_is_created_then_read(real: RealServer) -> None:
    system = [text("You are a librarian. " * 5), text("You know this book by heart. " * 6, MARK)]
    first = {"system": system, "messages": [{"role": "user", "content": "Who wrote it?"}]}
    second = {"system": system, "messages": [{"role": "user", "content": "What is it called?"}]}
    total = count(real, **first)
    before = pinned(real)
    read, created, other = usage_of(real, **first)
    assert read < 20 and read + created + other == total
    tokens = real.post(
        "/tokenize", messages=[{"role": "system", "content": "\n".join(part["text"] for part in system)}]
    )
    covered = tokens["count"] - real.post("/tokenize", prompt="<assistant>", add_special_tokens=False)["count"]
    assert (
        covered
        <= read + created
        <= covered + real.post("/tokenize", prompt="<user>", add_special_tokens=False)["count"]
    )
    assert pinned(real) - before == -(-(read + created) // 16)
    covered = read + created
    read, created_again, other = usage_of(real, **second)
    assert read >= covered and created_again == 0 and read + other == count(real, **second)


def test_two_breakpoints_of_two_lifetimes(real: RealServer) -> None:
    body = {
        "system": [text("A long rule that seldom changes. " * 4, HOUR)],
        "messages": [{"role": "user", "content": [text("A question of today. " * 3, MARK), text("And now?")]}],
    }
    usage = real.post("/v1/messages", model="tiny", max_tokens=1, **body)["usage"]
    assert (
        usage["cache_creation"]["ephemeral_1h_input_tokens"] > usage["cache_creation"]["ephemeral_5m_input_tokens"] > 0
    )
    assert 0 < usage["input_tokens"] < 40


def test_a_breakpoint_for_all_of_the_request(real: RealServer) -> None:
    body = {"messages": [{"role": "user", "content": "Remember all of this, please, until tomorrow."}]}
    read, created, other = usage_of(real, cache_control=MARK, **body)
    assert read + created + other == count(real, **body)
    assert read < 20 and other <= 11  # what all prompts begin with, and the assistant's header


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": [text(str(i), MARK) for i in range(5)]}]}, "at most 4"),
        ({"messages": [{"role": "user", "content": [text("a", MARK), text("b", HOUR)]}]}, "'1h' comes before"),
    ],
)
def test_breakpoints_that_make_no_sense(real: RealServer, body: dict[str, Any], named: str) -> None:
    response = httpx.post(real.url + "/v1/messages", json={"model": "tiny", "max_tokens": 1} | body, timeout=20)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_a_turn_of_the_assistant_at_the_end_is_continued(real: RealServer) -> None:
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is"}]
    got = real.post("/v1/messages", model="tiny", max_tokens=2, messages=messages)
    rendered = real.post("/tokenize", messages=messages, continue_final_message=True)
    assert got["usage"]["input_tokens"] + got["usage"]["cache_read_input_tokens"] == rendered["count"]
    assert real.post("/detokenize", tokens=rendered["tokens"])["prompt"].endswith("<assistant>It is")
