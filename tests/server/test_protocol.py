"""Bodies: what is taken, what is refused, and how the refusal names the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from scheduler.sampling_defaults import SamplingDefaults
from server.body import check_content_type, parse_body
from server.errors import BadRequest, UnknownModel
from server.messages.body import MessagesBody
from server.operator_protocol import CacheTargetBody
from server.protocol import ChatBody, CompletionBody, GenerationBody
from server.responses.body import ResponsesBody
from server.sampling import sampling_params, with_defaults
from server.served import ServedModels
from server.tokenize_protocol import DetokenizeBody
from tests.server.fake_engine import EOS, INFO

HELLO = [{"role": "user", "content": "hello"}]


def refusal(model: type[GenerationBody], body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_body(body if isinstance(body, bytes) else json.dumps(body).encode(), model)
    return caught.value


BOTH_REFUSE = [
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", True, "n"),
    ("temperature", -0.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", [1], "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 1.1, "min_p"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "7", "max_tokens"),
    ("max_tokens", 7.0, "max_tokens"),
    ("seed", 2**63, "seed"),
    ("seed", 10**30, "seed"),
    ("presence_penalty", 2.1, "presence_penalty"),
    ("frequency_penalty", -2.1, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("stop", "", "stop"),
    ("stop", ["a", 1], "stop"),
    ("stop", ["a", ""], "stop"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", 5, "stop"),
    ("stop", {"a": 1}, "stop"),
    ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
    ("stop_token_ids", ["1"], "stop_token_ids[0]"),
    ("stop_token_ids", 1, "stop_token_ids"),
    ("ignore_eos", 1, "ignore_eos"),
    ("min_tokens", -1, "min_tokens"),
    ("priority", 0.5, "priority"),
    ("logit_bias", {"5": -101}, "logit_bias.5"),
    ("logit_bias", {"5": "1"}, "logit_bias.5"),
    ("logit_bias", [5], "logit_bias"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
    ("bad_words", "bad", "bad_words"),
    ("bad_words", ["ok", ""], "bad_words[1]"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
    ("request_id", "", "request_id"),
    ("request_id", "a b", "request_id"),
    ("request_id", "x" * 129, "request_id"),
    ("skip_special_tokens", 0, "skip_special_tokens"),
    ("return_token_ids", "yes", "return_token_ids"),
    ("chat_template", "{{ messages }}", "chat_template"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("model", 5, "model"),
    ("user", 5, "user"),
    ("best_of_breed", 1, "best_of_breed"),
    ("logprobs", "many", "logprobs"),
]

COMPLETION_REFUSES = [
    ("best_of", 2, "best_of"),
    ("echo", "yes", "echo"),
    ("suffix", "tail", "suffix"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("messages", HELLO, "messages"),
    ("max_completion_tokens", 5, "max_completion_tokens"),
]

CHAT_REFUSES = [
    ("logprobs", 1, "logprobs"),
    ("top_logprobs", 1, "top_logprobs"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tool_choice", "required", "tool_choice"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("functions", [], "functions"),
    ("prompt", "x", "prompt"),
    ("modalities", ["audio"], "modalities[0]"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("continue_final_message", 1, "continue_final_message"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
    ("messages", [], "messages"),
    ("messages", "hello", "messages"),
    ("messages", [5], "messages[0]"),
    ("messages", [*HELLO, {"role": "user"}], "messages[1].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "wizard", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ("messages", [{"role": "assistant", "content": "x", "function_call": {}}], "messages[0].function_call.name"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages[0].content[0].y"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
]


@pytest.mark.parametrize(("field", "value", "param"), BOTH_REFUSE + COMPLETION_REFUSES)
def test_completion_refuses(field: str, value: Any, param: str) -> None:
    error = refusal(CompletionBody, {"prompt": "x", field: value})
    assert error.param == param
    assert repr(param) in error.message


@pytest.mark.parametrize(("field", "value", "param"), BOTH_REFUSE + CHAT_REFUSES)
def test_chat_refuses(field: str, value: Any, param: str) -> None:
    error = refusal(ChatBody, {"messages": HELLO, field: value})
    assert error.param == param
    assert repr(param) in error.message


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_are_finite(number: bytes) -> None:
    assert refusal(CompletionBody, b'{"prompt": "x", "temperature": ' + number + b"}").code == "invalid_json"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b'"x"', b"[" * 30_000, b"\xff\xfe", b'{"prompt": "\\ud800"}'])
def test_the_body_is_a_json_object(raw: bytes) -> None:
    assert refusal(CompletionBody, raw).code == "invalid_json"


@pytest.mark.parametrize("field", [b"prompt", b"cache", b"stream_options", b"unknown"])
@pytest.mark.parametrize(("opening", "closing"), [(b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_a_body_deeper_than_the_stack_is_refused(field: bytes, opening: bytes, closing: bytes) -> None:
    raw = b'{"%b":' % field + opening * 500 + b"1" + closing * 500 + b"}"
    assert "nested deeper" in refusal(CompletionBody, raw).message


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "model": "toy", "max_tokens": 1}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, user([5] * 5000)),
        (ChatBody, {"messages": HELLO, "allowed_token_ids": ["x"] * 5000}),
        (DetokenizeBody, {"tokens": ["x"] * 5000}),
        (ResponsesBody, {"input": user([5] * 5000)["messages"]}),
        (ResponsesBody, {"input": [{"type": "function_call_output", "call_id": "c", "output": [5] * 5000}]}),
        (ResponsesBody, {"input": "x", "include": ["x"] * 5000}),
        (MessagesBody, user([5] * 5000)),
        (MessagesBody, user([{"type": "tool_result", "tool_use_id": "t", "content": [5] * 5000}])),
        (MessagesBody, user("x") | {"system": [5] * 5000}),
        (CacheTargetBody, {"prompt": "x", "blocks": ["x"] * 5000}),
    ],
)
def test_one_fault_is_enough(model: type[BaseModel], body: Any) -> None:
    """Each would be described, and a body of megabytes has hundreds of thousands."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body, strict=True)
    assert caught.value.error_count() <= 2


def test_objects_have_few_members() -> None:
    many = dict.fromkeys(map(str, range(3000)), "x")
    error = refusal(CompletionBody, {"prompt": "x", "logit_bias": many})
    assert error.param == "logit_bias" and "more than 2048 members" in error.message
    assert "more than 2048 members" in refusal(CompletionBody, {"prompt": "x"} | many).message
    schema = {"type": "object", "properties": dict.fromkeys(many, {})}
    parse_body(orjson.dumps({"prompt": "x", "structured_outputs": {"json": schema}}), CompletionBody)


def test_fields_that_do_not_go_together() -> None:
    both = {"messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5}
    assert refusal(ChatBody, both).param == "max_completion_tokens"
    assert refusal(ChatBody, {"messages": HELLO, "max_completion_tokens": 4, "min_tokens": 5}).param == "min_tokens"
    assert refusal(CompletionBody, {"prompt": "x", "max_tokens": 4, "min_tokens": 5}).param == "min_tokens"
    both = {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}
    assert refusal(ChatBody, both).param == "add_generation_prompt"
    assert not ChatBody.model_validate(both | {"add_generation_prompt": None}).generation_prompt


@pytest.mark.parametrize("key", ["-1", "300", "05", "+5", "5.0", " 5", "five", "", "\u0665", "9" * 100_000])
def test_a_bias_is_of_a_token_of_the_vocabulary(key: str) -> None:
    body = CompletionBody(prompt="x", logit_bias={key: 1.0})
    with pytest.raises(BadRequest, match="a key is a token id below 300") as caught:
        sampling_params(body, 16, INFO)
    assert caught.value.param is not None and len(caught.value.message) < 300


@pytest.mark.parametrize("body", [{"x" * 100_000: 1}, {"stream_options": {"y" * 100_000: 1}}, {"model": "z" * 100_000}])
def test_an_error_repeats_only_so_much(body: dict[str, Any]) -> None:
    if "model" in body:
        with pytest.raises(UnknownModel) as unknown:
            ServedModels("toy").adapter(body["model"])
        assert len(orjson.dumps(unknown.value.body())) < 4000
        return
    assert refusal(CompletionBody, {"prompt": "x", "<b>": 1}).param == "<b>"
    error = refusal(CompletionBody, {"prompt": "x", **body})
    assert error.param is not None and error.param.endswith("\u2026") and len(orjson.dumps(error.body())) < 400


def test_missing_fields_are_named() -> None:
    assert refusal(CompletionBody, {}).param == "prompt"
    assert refusal(CompletionBody, {"prompt": None}).param == "prompt"
    assert refusal(ChatBody, {}).code == "missing_required_parameter"


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(("temperature", "stop", "n", "logit_bias", "suffix", "whatever", "stream_options"))
    assert parse_body(orjson.dumps({"prompt": "x", **nulls}), CompletionBody) == CompletionBody(prompt="x")
    message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}
    body = parse_body(orjson.dumps({"messages": [message], "stream": True, "stream_options": {}}), ChatBody)
    assert body.messages[0].for_template() == {"role": "assistant", "content": "x"}


def test_what_means_off_is_taken() -> None:
    off = {"n": 1, "logit_bias": {}, "bad_words": [], "stop": [], "top_k": -1, "user": "me", "stream": False}
    parse_body(orjson.dumps({"prompt": "x", "best_of": 1, "echo": False, **off}), CompletionBody)
    chat = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": True,
        "metadata": {"a": "b"},
    }
    parse_body(orjson.dumps({"messages": HELLO, **chat, **off}), ChatBody)


def test_developer_is_system_and_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = parse_body(orjson.dumps({"messages": [{"role": "developer", "content": parts}]}), ChatBody)
    assert body.messages[0].for_template() == {"role": "system", "content": parts}


def test_sampling_params() -> None:
    body = CompletionBody(prompt="x", temperature=1e-7, top_k=-1, seed=-1, stop_token_ids=[7], logprobs=3, min_tokens=2)
    params = sampling_params(body, 16, INFO)
    assert (params.temperature, params.top_k, params.seed) == (0.0, 0, 2**63 - 1)
    assert (params.stop_token_ids, params.logprobs, params.min_tokens, params.max_tokens) == ((7,), 3, 2, 16)
    drawn = {sampling_params(CompletionBody(prompt="x"), 16, INFO).seed for _ in range(8)}
    assert len(drawn) == 8
    body = CompletionBody(prompt="x", logit_bias={"7": -100, "0": 2.5}, allowed_token_ids=[9, 7, 9])
    params = sampling_params(body, 16, INFO, [(1, 2)])
    assert params.logit_bias == ((7, -100.0), (0, 2.5))
    assert (params.allowed_token_ids, params.bad_words) == ((7, 9), ((1, 2),))
    chat = ChatBody.model_validate({"messages": HELLO, "logprobs": True})
    assert sampling_params(chat, 16, INFO).logprobs == 0


DEFAULTS = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1)


def test_fields_that_are_left_out_or_null_are_the_models_own() -> None:
    info = replace(INFO, sampling=DEFAULTS)
    for fields in ({}, dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))):
        params = sampling_params(parse_body(orjson.dumps({"prompt": "x"} | fields), CompletionBody), 16, info)
        assert with_defaults(params, SamplingDefaults()) == DEFAULTS


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_field_of_the_body_overrides_its_default_alone(field: str) -> None:
    value = getattr(SamplingDefaults(), field)
    body = parse_body(orjson.dumps({"prompt": "x", field: value}), CompletionBody)
    params = sampling_params(body, 16, replace(INFO, sampling=DEFAULTS))
    assert with_defaults(params, SamplingDefaults()) == replace(DEFAULTS, **{field: value})


def test_sampling_refuses_unknown_stop_tokens_and_too_many_min_tokens() -> None:
    with pytest.raises(BadRequest, match="token id 300 is outside the vocabulary of 300"):
        sampling_params(CompletionBody(prompt="x", stop_token_ids=[300]), 16, INFO)
    with pytest.raises(BadRequest, match="20 is above the 16 tokens"):
        sampling_params(CompletionBody(prompt="x", min_tokens=20), 16, INFO)


def test_sampling_refuses_to_have_nothing_to_choose() -> None:
    nothing: list[tuple[dict[str, Any], list[tuple[int, ...]]]] = [
        ({"allowed_token_ids": [7, 8]}, [(7,), (8,), (9, 7)]),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, []),
        ({"allowed_token_ids": [EOS, 7], "min_tokens": 1, "stop_token_ids": [7]}, []),
    ]
    for fields, bad_words in nothing:
        with pytest.raises(BadRequest, match="none of them may be chosen"):
            sampling_params(CompletionBody(prompt="x", **fields), 16, INFO, bad_words)
    sampling_params(CompletionBody(prompt="x", allowed_token_ids=[7]), 16, INFO, [(7, 7)])
    sampling_params(CompletionBody(prompt="x", allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True), 16, INFO)


@pytest.mark.parametrize("value", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_content_type(value: str | None) -> None:
    check_content_type("Application/JSON; charset=utf-8")
    with pytest.raises(BadRequest, match="application/json"):
        check_content_type(value)
