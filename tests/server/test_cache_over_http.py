"""Drop, invalidate, plan, reports and cache control over HTTP, on a real engine; prompts of 8 blocks of 16 tokens."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.state import ServerSettings
from tests.server.real import RealServer, serve_real

FIELDS = ["prompt_tokens", "valid_prefix", "computed", "reused", "copied", "loaded", "pending", "blocks"]
BLOCK_FIELDS = ["index", "start", "end", "hash", "status", "tier", "reason", "first_difference"]
RECOMPUTED = 'pagekv_recomputed_tokens_total{model_name="tiny"}'


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[RealServer]:
    with serve_real(chat_model) as running:
        yield running


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """128 tokens that no other test sends."""
    return random.Random(request.node.name).choices(range(10, 250), k=128)


def edited(prompt: list[int], position: int) -> list[int]:
    return [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]


def test_the_standing_example_lost(server: RealServer, prompt: list[int]) -> None:
    cold = server.complete(prompt, 5)["choices"][0]["text"]
    whole = server.post("/v1/cache/drop", model="tiny", prompt=prompt, blocks=[2])
    assert whole == {"blocks": 1, "bytes": whole["bytes"], "by_tier": {"device": 1}} and whole["bytes"] > 0
    plan = server.plan(prompt)
    assert list(plan) == FIELDS and [list(block) for block in plan["blocks"]] == [BLOCK_FIELDS] * 8
    assert (plan["prompt_tokens"], plan["valid_prefix"], plan["computed"]) == (128, 32, [[32, 48], [127, 128]])
    assert (plan["reused"], plan["copied"], plan["loaded"], plan["pending"]) == (96, 15, 0, 0)
    block = plan["blocks"][2]
    assert (block["start"], block["end"], block["status"], block["tier"]) == (32, 48, "computed", None)
    assert (block["reason"], block["first_difference"]) == ("dropped", None)
    assert [each["status"] for each in plan["blocks"]] == [*["reused"] * 2, "computed", *["reused"] * 4, "copied"]
    assert plan["blocks"][7]["reason"] == "last_position"
    assert server.plan(prompt) == plan  # asking changes nothing
    answer = server.complete(prompt, 5, cache_report=True)
    assert answer["choices"][0]["text"] == cold
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 111
    assert answer["cache_report"] == plan  # what was planned is what happened


def test_the_standing_example_invalidated(server: RealServer, prompt: list[int]) -> None:
    cold = server.complete(prompt, 5)["choices"][0]["text"]
    effect = server.post("/v1/cache/invalidate", prompt=prompt, blocks=[2])
    assert effect["blocks"] >= 6 and effect["by_tier"] == {"device": effect["blocks"]}  # the tail of the answer as well
    plan = server.plan(prompt)
    assert (plan["valid_prefix"], plan["computed"]) == (32, [[32, 128]])
    assert [block["reason"] for block in plan["blocks"][2:]] == ["invalidated"] * 6
    answer = server.complete(prompt, 5)
    assert answer["choices"][0]["text"] == cold
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_the_standing_example_edited(server: RealServer, prompt: list[int]) -> None:
    server.complete(prompt)
    plan = server.plan(edited(prompt, 39))
    assert (plan["valid_prefix"], plan["computed"], plan["copied"]) == (32, [[39, 128]], 7)
    assert plan["blocks"][2]["reason"] == "different_token" and plan["blocks"][2]["status"] == "copied"
    assert plan["blocks"][2]["first_difference"] == {"position": 39}
    assert server.cached(edited(prompt, 39)) == 39


def test_the_cached_token_is_told_under_a_salt_of_ones_own(server: RealServer, prompt: list[int]) -> None:
    server.complete(prompt, cache_salt="mine")
    plan = server.plan(edited(prompt, 39), cache_salt="mine")
    assert plan["blocks"][2]["first_difference"] == {"position": 39, "cached_token": prompt[39]}
    stranger = server.plan(prompt, cache_salt="other")
    assert (stranger["valid_prefix"], stranger["computed"]) == (0, [[0, 128]])
    assert {block["reason"] for block in stranger["blocks"]} == {"never_seen"}
    assert all(block["first_difference"] is None for block in stranger["blocks"])


def test_the_cached_token_is_told_where_the_operator_says_so(chat_model: Path, prompt: list[int]) -> None:
    with serve_real(chat_model, ServerSettings("tiny", reveal_cached_tokens=True)) as server:
        server.complete(prompt)
        plan = server.plan(edited(prompt, 39))
        assert plan["blocks"][2]["first_difference"] == {"position": 39, "cached_token": prompt[39]}


def test_targets(server: RealServer, prompt: list[int]) -> None:
    server.complete(prompt)
    name = server.plan(prompt)["blocks"][3]["hash"]
    assert server.post("/v1/cache/drop", block_hash=name)["blocks"] == 1
    assert server.plan(prompt)["computed"] == [[48, 64], [127, 128]]
    server.complete(prompt)
    assert server.post("/v1/cache/invalidate", block_hash=name)["blocks"] == 5
    assert server.plan(prompt)["computed"] == [[48, 128]]
    server.complete(prompt, cache_salt="s")
    assert server.post("/v1/cache/drop", prompt=prompt, cache_salt="s", blocks=[0, 7])["blocks"] == 2
    assert server.plan(prompt, cache_salt="s")["computed"] == [[0, 16], [112, 128]]
    assert server.post("/v1/cache/invalidate", cache_salt="s")["blocks"] == 6
    assert server.plan(prompt, cache_salt="s")["computed"] == [[0, 128]]
    server.complete(prompt)
    assert server.cached(prompt) == 127  # what was done under the salt touched nothing here
    assert server.post("/v1/cache/drop", prompt=prompt)["blocks"] == 8
    assert server.cached(prompt) == 0
    assert server.post("/v1/cache/drop", all=True)["blocks"] >= 8
    assert server.cached(prompt) == 0
    assert server.post("/v1/cache/invalidate", all=True)["blocks"] >= 8
    assert server.post("/v1/cache/invalidate", all=True) == {"blocks": 0, "bytes": 0, "by_tier": {"device": 0}}


def test_messages_are_the_prompt_they_make(server: RealServer) -> None:
    messages = [{"role": "user", "content": "how many rivers " * 12}]
    usage = server.post("/v1/chat/completions", messages=messages, max_tokens=1)["usage"]
    tokens = usage["prompt_tokens"]
    plan = server.post("/v1/cache/plan", messages=messages, temperature=0.5, max_completion_tokens=3)
    assert (plan["prompt_tokens"], plan["computed"]) == (tokens, [[tokens - 1, tokens]])
    assert server.post("/v1/cache/drop", messages=messages, blocks=[1])["blocks"] == 1
    assert server.post("/v1/cache/plan", messages=messages)["computed"] == [[16, 32], [tokens - 1, tokens]]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1, cache_report=True)
    assert answer["cache_report"]["computed"] == [[16, 32], [tokens - 1, tokens]]
    assert server.post("/v1/cache/invalidate", messages=messages)["blocks"] >= tokens // 16


@pytest.mark.parametrize("path", ["/v1/cache/drop", "/v1/cache/invalidate"])
@pytest.mark.parametrize("everything", [False, True])
def test_streams_go_on_undisturbed(server: RealServer, prompt: list[int], path: str, everything: bool) -> None:
    """Three streams share a prompt; after each has begun, the cache changes under them."""
    expected = server.complete(prompt, 60, cache_salt="quiet")["choices"][0]["text"]
    target = {"all": True} if everything else {"prompt": prompt, "blocks": [2, 5]}
    changed = threading.Event()
    before = metrics(server)[RECOMPUTED]
    texts = ["", "", ""]

    def listen(index: int) -> None:
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    texts[index] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if not changed.is_set() and index == 0:
                        server.post(path, **target)
                        changed.set()

    threads = [threading.Thread(target=listen, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert changed.is_set() and texts == [expected] * 3
    again = metrics(server)[RECOMPUTED] - before
    assert again > 0 if path == "/v1/cache/drop" else again == 0  # detached requests keep what they hold
    assert server.complete(prompt, 60)["choices"][0]["text"] == expected


def test_a_plan_computes_nothing(server: RealServer, prompt: list[int]) -> None:
    before = metrics(server)
    for _ in range(3):
        assert server.plan(prompt)["computed"] == [[0, 128]]
    assert metrics(server) == before
    assert server.cached(prompt) == 0


def metrics(server: RealServer) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("pagekv_"))}


def test_control_of_one_request(server: RealServer, prompt: list[int]) -> None:
    assert server.cached(prompt, cache={"write": False}) == 0
    assert server.cached(prompt, cache={"ttl": 1000}) == 0
    plan = server.plan(prompt, cache={"read": False})
    assert plan["computed"] == [[0, 128]] and {block["reason"] for block in plan["blocks"]} == {"opted_out"}
    assert server.cached(prompt, cache={"read": False}) == 0
    assert server.cached(prompt, cache={"pin": True}) == 127
    assert metrics(server)['pagekv_pinned_blocks{model_name="tiny"}'] == 8
    server.post("/v1/cache/invalidate", prompt=prompt)


def test_salts_share_nothing(server: RealServer, prompt: list[int]) -> None:
    assert [server.cached(prompt, cache_salt=salt) for salt in ("a", "b", "a", "b")] == [0, 0, 127, 127]
    assert server.cached(prompt) == 0


def chunks_of(server: RealServer, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_report_comes_with_the_last_chunk(server: RealServer, path: str, usage: bool) -> None:
    text = f"what comes last, {usage}? " * 8
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    body = {**asked, "max_tokens": 3, "ignore_eos": True, "cache_report": True}
    for _ in range(2):
        plan = server.post("/v1/cache/plan", **body)
        chunks = chunks_of(server, path, body | ({"stream_options": {"include_usage": True}} if usage else {}))
        assert [chunk.get("cache_report") for chunk in chunks] == [None] * (len(chunks) - 1) + [plan]
        assert (chunks[-1]["choices"] == []) is usage
    silent = chunks_of(server, path, body | {"cache_report": False})
    assert not any("cache_report" in chunk for chunk in silent)


def test_the_report_is_logged_for_debugging(
    server: RealServer, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    server.complete(prompt)
    with caplog.at_level(logging.DEBUG, "pagekv"):
        answer = server.complete(prompt)
    assert "cache_report" not in answer
    lines = [record.getMessage() for record in caplog.records if "cache report of" in record.getMessage()]
    assert len(lines) == 1 and f"{answer['id']}-0" in lines[0]
    assert json.loads(lines[0].split(": ", 1)[1])["computed"] == [[127, 128]]


def test_the_official_client_sends_and_reads_them(server: RealServer, prompt: list[int]) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        extra = {"cache_salt": "client", "cache": {"ttl": 60}, "cache_report": True}
        for expected in (0, 127):
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == expected
            assert answer.model_extra is not None
            assert answer.model_extra["cache_report"]["computed"] == [[expected, 128]]
        with pytest.raises(openai.BadRequestError) as empty:
            client.completions.create(model="tiny", prompt=prompt, extra_body={"cache_salt": ""})
        assert empty.value.param == "cache_salt"


def reference_logprobs(chat_model: Path, prompt: list[int]) -> torch.Tensor:
    """Of every token at every position but the last, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)  # type: ignore[no-any-return]


def test_prompt_logprobs_are_the_cold_values(server: RealServer, chat_model: Path, prompt: list[int]) -> None:
    expected = reference_logprobs(chat_model, prompt)
    answers = [server.complete(prompt, prompt_logprobs=3) for _ in range(2)]  # the second finds all in the cache
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for answer in answers)
    got = answers[0]["choices"][0]["prompt_logprobs"]
    assert answers[1]["choices"][0]["prompt_logprobs"] == got
    assert len(got) == 128 and got[0] is None
    for position in range(1, 128):
        entry, row = got[position], expected[position - 1]
        token = prompt[position]
        assert list(entry)[0] == str(token) and 3 <= len(entry) <= 4
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert entry[str(token)]["rank"] == int((row > row[token]).sum()) + 1
        assert {int(key) for key in entry} == {token, *row.topk(3).indices.tolist()}
        for key, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)


def test_prompt_logprobs_of_a_chat(server: RealServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", **body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


def test_echo_with_logprobs(server: RealServer, chat_model: Path) -> None:
    text = "Hello there, été 中文!"
    plain = server.complete(text, 4, logprobs=2)["choices"][0]
    assert server.complete(text, 4, echo=True)["choices"][0]["text"] == text + plain["text"]
    for _ in range(2):
        answer = server.complete(text, 4, logprobs=2, echo=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        choice = answer["choices"][0]
        assert choice["text"] == text + plain["text"] and choice["prompt_logprobs"] is None
        logprobs = choice["logprobs"]
        size = answer["usage"]["prompt_tokens"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert [len(values) for values in logprobs.values()] == [size + 4] * 4
        assert logprobs["tokens"][size:] == plain["logprobs"]["tokens"]
        assert logprobs["text_offset"][size:] == [len(text) + at for at in plain["logprobs"]["text_offset"]]
        for at, token in zip(logprobs["text_offset"][:size], logprobs["tokens"][:size], strict=True):
            assert token.startswith("bytes:") or text[at:].startswith(token)
        assert all(len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_scoring_a_text_as_evaluations_do(server: RealServer, chat_model: Path, prompt: list[int]) -> None:
    """max_tokens of 0: nothing is generated, and the echo is all."""
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")
    expected = reference_logprobs(chat_model, prompt)
    scored = [float(expected[position - 1, prompt[position]]) for position in range(1, 128)]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scored, abs=1e-4)
    assert len(choice["logprobs"]["tokens"]) == 128


def test_a_streamed_echo_comes_first(server: RealServer) -> None:
    body = {"prompt": "Hello world", "max_tokens": 3, "ignore_eos": True, "temperature": 0, "echo": True, "logprobs": 0}
    whole = server.post("/v1/completions", **body)["choices"][0]
    chunks = chunks_of(server, "/v1/completions", body)
    assert chunks[0]["choices"][0]["text"].startswith("Hello world")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in parts for each in part[name]] == whole["logprobs"][name]
