"""/v1/messages: Anthropic's shapes, whole and as events, and breakpoints that pin what they cover."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import EOS
from tests.server.harness import Running, serve
from tests.server.real import RealServer, save_chat_model, serve_real

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
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking"),
        ({"container": "c"}, "'container' is not supported"),
        ({"mcp_servers": []}, "'mcp_servers' is not supported"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text' is required"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]}]}, ".citations'"),
        ({"messages": [{"role": "user", "content": [5]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": "rude"}]}, "be polite"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0]"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'cache_control.ttl'"),
        ({"cache_control": {"type": "forever"}}, "'cache_control.type'"),
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


# -- breakpoints, over a real engine -----------------------------------------------------------------------------------

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path)
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


def test_what_a_breakpoint_covers_is_created_then_read(real: RealServer) -> None:
    system = [text("You are a librarian. " * 5), text("You know this book by heart. " * 6, MARK)]
    first = {"system": system, "messages": [{"role": "user", "content": "Who wrote it?"}]}
    second = {"system": system, "messages": [{"role": "user", "content": "What is it called?"}]}
    total = count(real, **first)
    before = pinned(real)
    read, created, other = usage_of(real, **first)
    assert read < 5 and read + created + other == total
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
    assert read < 5 and other <= 11  # what all prompts begin with, and the assistant's header


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
