"""Models whose tags of calls and of reasoning are one token each, special or not: forced, free and read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.tokenizer import Tokenizer
from tests.server.fake_engine import INFO
from tests.server.harness import serve
from tests.server.json_schemas import enum, obj
from tests.server.real import RealServer, save_chat_model, serve_real
from tests.server.tagged_tokenizers import CONTROL, KINDS, TAGS, load_tagged, tagged

ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER = obj(city=enum("Oslo", "Ålesund"))
FUNCTION = {"name": "weather", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}


class Tagged:
    def __init__(self, server: RealServer, tokenizer: Tokenizer) -> None:
        self.server = server
        self.ids = {text: tokenizer.encode(text, add_special_tokens=False)[-1] for text in (*TAGS, CONTROL, "{")}

    def chat(self, **fields: Any) -> Any:
        fixed = {"messages": ASK, "max_tokens": 200, "seed": 0, "return_token_ids": True}
        return self.server.post("/v1/chat/completions", **fixed | fields)["choices"][0]

    def held(self, **outputs: Any) -> tuple[str, list[int]]:
        choice = self.chat(structured_outputs=outputs)
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"], choice["token_ids"]


@pytest.fixture(scope="module", params=["text", "sentencepiece special", "USER_DEFINED", "CONTROL"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tagged]:
    path = tmp_path_factory.mktemp("tagged")
    save_chat_model(path, max_model_len=2048, tokenizer=tagged(request.param))
    tokenizer = load_tagged(request.param, tmp_path_factory.mktemp("tokenizer"))
    with serve_real(path, tokenizer=tokenizer) as server:
        yield Tagged(server, tokenizer)


def check(name: str, arguments: str) -> None:
    assert name == "weather"
    assert json.loads(arguments) in ({"city": "Oslo"}, {"city": "Ålesund"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_begins_with_the_one_token(model: Tagged, choice: Any) -> None:
    answer = model.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer["message"]["tool_calls"]
    check(**call["function"])
    assert answer["message"]["content"] is None
    assert answer["token_ids"][0] == model.ids["<tool_call>"]
    assert model.ids["</tool_call>"] in answer["token_ids"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_of_messages(model: Tagged, choice: dict[str, Any]) -> None:
    tool = {"name": "weather", "input_schema": WEATHER}
    asked = {"messages": ASK, "max_tokens": 200, "tools": [tool], "model": "tiny"}
    answer = model.server.post("/v1/messages", **asked, tool_choice=choice | {"disable_parallel_tool_use": True})
    (block,) = answer["content"]
    check(block["name"], json.dumps(block["input"]))
    assert answer["stop_reason"] == "tool_use"


def test_a_forced_call_of_responses(model: Tagged) -> None:
    tool = {"type": "function", **FUNCTION, "strict": False}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    (item,) = model.server.post("/v1/responses", input="hi", **asked)["output"]
    check(item["name"], item["arguments"])


def test_a_strict_function_may_still_be_called_by_the_one_token(model: Tagged) -> None:
    strict = {**TOOL, "function": {**FUNCTION, "strict": True}}
    opening = {str(model.ids["<tool_call>"]): 100}
    answer = model.chat(tools=[strict], logit_bias=opening, parallel_tool_calls=False, max_tokens=500)
    assert answer["token_ids"][0] == model.ids["<tool_call>"]
    check(**answer["message"]["tool_calls"][0]["function"])


def test_an_answer_of_a_schema_beside_tools(model: Tagged) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": obj(thought=enum("<think>a</think>"))}}
    begins = {str(model.ids["{"]): 100}
    answer = model.chat(tools=[TOOL], response_format=form, logit_bias=begins)
    assert json.loads(answer["message"]["content"]) == {"thought": "<think>a</think>"}


SPELLED = "<think>ab</think>"


@pytest.mark.parametrize(
    ("outputs", "whole"),
    [
        ({"regex": "<think>[a-c]{2}</think>(x|<tool_call>)"}, "<think>[a-c]{2}</think>(x|<tool_call>)"),
        ({"choice": [SPELLED, "<tool_call>"]}, f"{SPELLED}|<tool_call>"),
        ({"grammar": 'start: "<think>" /[a-c]/~2 "</think>"'}, "<think>[a-c]{2}</think>"),
        ({"grammar": 'start: <think> "<" /[a-c]/ </think> // "as <think>'}, "<think><[a-c]</think>"),
        ({"grammar": 'root ::= "<think>" [a-c] [a-c] "</think>"'}, "<think>[a-c]{2}</think>"),
        ({"json": {"enum": [SPELLED]}}, f'"{SPELLED}"'),
        ({"choice": [" a", "  <think>"]}, " a|  <think>"),
        ({"json": {"type": "string", "pattern": "^<tool_call>[a-c]$"}}, '"<tool_call>[a-c]"'),
        ({"json": {"type": "object", "properties": {"<think>": {"const": 1}}, "required": ["<think>"],
                   "additionalProperties": False}}, r'\{\s*"<think>"\s*:\s*1\s*\}'),
        ({"regex": r"<\|other\|>[a-c]"}, r"<\|other\|>[a-c]"),
    ],
)  # fmt: skip
def test_a_grammar_that_spells_such_a_token(model: Tagged, outputs: Any, whole: str) -> None:
    text, ids = model.held(**outputs)
    assert re.fullmatch(whole, text), text
    assert model.ids[CONTROL] not in ids


def test_the_one_token_is_written_where_the_text_is_forced(model: Tagged) -> None:
    text, ids = model.held(choice=[SPELLED])
    assert text == SPELLED
    assert {model.ids["<think>"], model.ids["</think>"]} < set(ids)


def test_a_special_token_can_be_named_in_lark(model: Tagged) -> None:
    _, ids = model.held(grammar='start: "a" <|other|> "b"')
    assert model.ids[CONTROL] in ids


# -- without a grammar: a dictated text -------------------------------------------------------------------------------

SAID = 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_the_models_own_accord_is_seen(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tagged(kind, tmp_path)
    dictated = [*tokenizer.encode(f"<think>{CONTROL}", False), *tokenizer.encode(SAID, False)]
    info = replace(INFO, vocab_size=600, eos_token_ids=(tokenizer.eos_token_id or 0,), max_model_len=2048)
    body = {"messages": ASK, "tools": [TOOL], "max_tokens": 400}
    eos = [tokenizer.eos_token_id]
    with serve(script=lambda _: [*dictated, *eos], tokenizer=tokenizer, info=info) as server:  # type: ignore[arg-type]
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        plain = server.post("/v1/chat/completions", body | {"tool_choice": "none"}).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Oslo"}')
    is_special = kind.endswith("special") or kind == "CONTROL"
    assert message["content"].replace(" ", "") == ("" if is_special else "<think>") + "Ilook."
    assert CONTROL not in message["content"]
    assert ("<tool_call>" in plain["content"]) is not is_special
