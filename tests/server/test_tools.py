"""Tools over HTTP with the official client: a tiny random model that is made to call, and a fake engine that dictates
what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from server.protocol import ChatBody
from server.tokenizer import Tokenizer
from server.tools import DEFAULT_FORMAT, FORMAT_NAMES
from server.tools.registry import FORMATS
from tests.server.fake_engine import EOS, INFO
from tests.server.harness import ByteTokenizer, serve
from tests.server.json_schemas import array, enum, obj, text, whole
from tests.server.real import RealServer, save_chat_model, serve_real
from tests.server.tiny_tokenizers import byte_level

ASK: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER = obj(city=enum("Oslo", "Ålesund"), days=whole(1, 7))
ALARM = obj(at=text(5), labels=array(enum("a", "b"), 0, 2))
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "alarm", "parameters": ALARM}},
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
LETTERS = [token for token in range(350) if byte_level().decode([token]).isascii()]
SCHEMAS = {"weather": WEATHER, "alarm": ALARM}


@pytest.fixture(scope="module")
def server(roomy_model: Path) -> Iterator[RealServer]:
    with serve_real(roomy_model, num_blocks=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def create(client: openai.OpenAI, **fields: Any) -> Any:
    fixed = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_completion_tokens": 200, "seed": 0}
    return client.chat.completions.create(**fixed | fields)


def check_calls(message: ChatCompletionMessage) -> list[str]:
    """The names of the functions called, each with arguments that fit its schema."""
    assert message.content is None and message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function" and re.fullmatch("[a-zA-Z0-9]{9}", call.id)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


def joined(stream: Any) -> tuple[str, list[dict[str, Any]], str]:
    """(content, calls, finish reason) of a stream, put together as clients do."""
    content, calls, reason = "", list[dict[str, Any]](), ""
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            if piece.index == len(calls):
                assert piece.id and piece.type == "function" and piece.function.name
                calls.append({"name": piece.function.name, "arguments": "", "pieces": 0})
            calls[piece.index]["arguments"] += piece.function.arguments
            calls[piece.index]["pieces"] += 1
    return content, calls, reason


# -- a random model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_required(client: openai.OpenAI, parallel: bool) -> None:
    for seed in range(2):
        fields = {
            "tool_choice": "required",
            "parallel_tool_calls": parallel,
            "seed": seed,
            "max_completion_tokens": 400,
        }
        choice = create(client, **fields).choices[0]
        called = check_calls(choice.message)
        assert choice.finish_reason == "tool_calls" and (parallel or len(called) == 1)
        content, calls, reason = joined(create(client, **fields, stream=True))
        assert (content, reason) == ("", "tool_calls")
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls
        ]
        assert any(call["pieces"] > 2 for call in calls)


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    choice = create(client, tool_choice={"type": "function", "function": {"name": "alarm"}}).choices[0]
    assert check_calls(choice.message) == ["alarm"] and choice.finish_reason == "stop"


def test_auto_with_strict_functions_leaves_the_text_free(client: openai.OpenAI) -> None:
    asked = {"max_completion_tokens": 20, "temperature": 0, "extra_body": {"allowed_token_ids": LETTERS}}
    free = create(client, **asked).choices[0].message
    held = create(client, tools=STRICT, **asked).choices[0].message
    assert held.content == free.content and held.tool_calls is None


def test_an_answer_of_a_schema_or_a_call(client: openai.OpenAI) -> None:
    schema = obj(sum=whole(0, 9))
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    for seed, is_call in ((3, True), (4, False)):  # as this model happens to draw
        message = create(client, response_format=form, seed=seed, temperature=3.0).choices[0].message
        assert (message.tool_calls is not None) == is_call
        if message.content is not None:
            jsonschema.validate(json.loads(message.content), schema)


NOTHING = ({}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}, {"parameters": None})


@pytest.mark.parametrize("said", NOTHING, ids=str)
def test_a_function_without_parameters_is_given_none(client: openai.OpenAI, said: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now", **said}}]
    fields = {"parallel_tool_calls": False, "max_completion_tokens": 400}
    choice = create(client, tools=tools, tool_choice="required", **fields).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}


@pytest.mark.parametrize(
    "shape", [{"properties": {"city": {"const": "Oslo"}}}, {"anyOf": [{"const": 3}, {"const": {}}]}]
)
def test_arguments_are_an_object_where_the_schema_does_not_say_so(client: openai.OpenAI, shape: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": shape | {"additionalProperties": False}}}]
    choice = create(client, tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)


def test_arguments_that_can_be_no_object_are_refused_where_they_are_held_to_a_schema(client: openai.OpenAI) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    with pytest.raises(openai.BadRequestError, match="object") as error:
        create(client, tools=tools, tool_choice="required")
    assert error.value.param == "tools[2].function.parameters"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"extra_body": {"functions": []}}, "functions"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(client, **fields)
    assert error.value.param == param


def test_parameters_that_cannot_be_held_to_are_refused_where_they_are_to_be(client: openai.OpenAI) -> None:
    odd: Any = {"type": "function", "function": {"name": "odd", "parameters": {"type": "array", "uniqueItems": True}}}
    held = {**odd, "function": {**odd["function"], "strict": True}}
    for fields in ({"tools": [*TOOLS, odd], "tool_choice": "required"}, {"tools": [*TOOLS, held]}):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as error:
            create(client, **fields)
        assert error.value.param == "tools[2].function.parameters"
    create(client, tools=[*TOOLS, odd], max_completion_tokens=2)
    create(client, tools=[*TOOLS, held], tool_choice="none", max_completion_tokens=2)


# -- a dictated text --------------------------------------------------------------------------------------------------

SAID = 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Ålesund", "days": 2}}\n</tool_call>'
CALL = ("weather", '{"city": "Ålesund", "days": 2}')


@pytest.fixture(scope="module")
def dictated() -> Iterator[openai.OpenAI]:
    with (
        serve(
            script=lambda _: [*SAID.encode(), EOS],
            answer=lambda _: None,
            tokenizer=JsonTokenizer(),
            info=replace(INFO, max_model_len=4096),
        ) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


class JsonTokenizer(ByteTokenizer):
    def to_json(self) -> str:
        return "{}"

    def tokens(self) -> tuple[bytes, ...]:
        return tuple(map(self.token_bytes, range(EOS + 1)))


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tools": STRICT}, {"parallel_tool_calls": False}])
def test_a_call_the_model_makes_of_its_own_accord(dictated: openai.OpenAI, fields: dict[str, Any]) -> None:
    choice = create(dictated, model="toy", **fields).choices[0]
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [CALL]
    content, calls, reason = joined(create(dictated, model="toy", **fields, stream=True))
    assert (content, reason) == ("I look.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [CALL]


def test_without_tools_or_with_none_the_text_is_all_content(dictated: openai.OpenAI) -> None:
    for fields in ({"tools": [], "tool_choice": "none"}, {"tool_choice": "none"}):
        message = create(dictated, model="toy", **fields).choices[0].message
        assert message.content == SAID and message.tool_calls is None


def test_a_call_that_is_cut_off_says_so(dictated: openai.OpenAI) -> None:
    choice = create(dictated, model="toy", max_completion_tokens=70).choices[0]
    assert choice.finish_reason == "length"
    assert CALL[1].startswith(choice.message.tool_calls[0].function.arguments)
    content, calls, reason = joined(create(dictated, model="toy", max_completion_tokens=70, stream=True))
    assert (content, reason, calls[0]["arguments"]) == (
        "I look.",
        "length",
        choice.message.tool_calls[0].function.arguments,
    )


def test_a_call_that_is_cut_off_anywhere_is_taken_back(dictated: openai.OpenAI) -> None:
    for size in range(SAID.index("{"), len(SAID.encode())):
        message = create(dictated, model="toy", max_completion_tokens=size).choices[0].message
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "?"} for call in message.tool_calls or ()]
        create(dictated, model="toy", messages=[*ASK, message, *answers, *ASK], max_completion_tokens=1)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ("{", {}),
        ('{"city": "Os', {}),
        ('{"a": [1, {"b"', {}),
        (' {"a": ]}', {}),
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
        ('{"a": "\\ud83d"}', {"a": "?"}),
        ('{"a": 1e400}', {"a": float("inf")}),
        (CALL[1], {"city": "Ålesund", "days": 2}),
    ],
)
def test_arguments_of_an_earlier_call(text: str, read: dict[str, Any]) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": text}}
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    (made,) = body.messages[0].for_template()["tool_calls"]
    assert made["function"]["arguments"] == read


@pytest.mark.parametrize("text", ["[", "[]", "3", "null", "city", '{"a":' * 3000 + "1" + "}" * 3000])
def test_arguments_that_are_none_are_refused(dictated: openai.OpenAI, text: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": text}}
    with pytest.raises(openai.BadRequestError) as error:
        create(dictated, model="toy", messages=[{"role": "assistant", "content": "", "tool_calls": [call]}, *ASK])
    assert error.value.param == "messages[0].tool_calls[0].function.arguments"


def test_logprobs_of_all_tokens_come_in_a_stream_too(dictated: openai.OpenAI) -> None:
    whole = create(dictated, model="toy", logprobs=True).choices[0].logprobs.content
    chunks = list(create(dictated, model="toy", logprobs=True, stream=True))
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in whole]


# -- what the model is told -------------------------------------------------------------------------------------------

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "assistant", "content": "Rain at noon."},
]


def test_every_name_of_a_format_names_one() -> None:
    assert set(FORMATS) == set(FORMAT_NAMES) and DEFAULT_FORMAT in FORMATS


def test_a_template_that_knows_no_tools_has_them_written_out() -> None:
    body = ChatBody.model_validate(
        {"messages": [m | {"content": m["content"] or ""} for m in CONVERSATION], "tools": TOOLS}
    )
    told = FORMATS["hermes"].as_text([message.for_template() for message in body.messages], body.tools)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "assistant"]
    assert '"name": "weather", "description": "A forecast."' in told[0]["content"] and "Ålesund" in told[0]["content"]
    assert told[2]["content"] == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    )
    assert told[3]["content"] == ("<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>")
    with_system = FORMATS["hermes"].as_text([{"role": "system", "content": "Be brief."}], body.tools)
    assert len(with_system) == 1 and with_system[0]["content"].startswith("Be brief.\n\n")


TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}({{ call.function.name }} "
    "{{ call.function.arguments.city }}){% endfor %}{% endfor %}"
)


def test_a_template_that_knows_tools_gets_them(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.takes_tools
    with serve_real(tmp_path) as server:
        rendered = server.post("/v1/chat/completions/render", messages=CONVERSATION, tools=TOOLS)
        asked = {"messages": CONVERSATION, "tools": TOOLS, "max_tokens": 5}
        assert server.post("/v1/chat/completions", **asked)["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    assert tokenizer.decode(rendered["token_ids"], skip_special_tokens=False) == (
        "[weather][alarm]<user>Weather and time?<assistant>(weather Oslo)(time )"
        "<tool>rain<tool>noon<assistant>Rain at noon."
    )
