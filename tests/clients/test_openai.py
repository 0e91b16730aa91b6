"""The official Python client in a scripted conversation over what the two OpenAI APIs offer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.server.real import RealServer

MODEL = "tiny"
TURNS = [
    {"role": "system", "content": "Answer as a sailor of the old days would, and be brief about it."},
    {"role": "user", "content": "What is the wind doing today?"},
]


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_conversation_of_two_turns_computes_the_first_once(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=24)
    assert first.usage is not None and first.usage.completion_tokens <= 24
    said = first.choices[0].message.content
    turns = [*TURNS, {"role": "assistant", "content": said}, {"role": "user", "content": "And tomorrow?"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_completion_tokens=8)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert second.usage.prompt_tokens > second.usage.prompt_tokens_details.cached_tokens


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=24)
    with client.chat.completions.create(
        model=MODEL,
        messages=TURNS,
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_accumulation_of_a_stream(client: OpenAI) -> None:
    text = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=24)
    said = text.choices[0].message.content
    assert said is not None
    with client.chat.completions.stream(
        model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=24, stop=said[-3:]
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == said[: said.index(said[-3:])]


def test_several_choices_with_a_seed(client: OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=TURNS, n=3, seed=5, temperature=1.5, top_p=0.9, max_completion_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert ask() == ask()
    assert len(set(ask())) == 3


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for each in logprobs.content:
        assert each.logprob == max(top.logprob for top in each.top_logprobs) and len(each.top_logprobs) == 3


def test_bias_and_penalties(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Ahoy",
        max_tokens=4,
        temperature=0,
        logit_bias={"70": 100},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        extra_body={"return_token_ids": True},
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == [70] * 4


def test_stop(client: OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="Ahoy", max_tokens=16, temperature=0).choices[0].text
    stop = text[5:7]
    stopped = client.completions.create(model=MODEL, prompt="Ahoy", max_tokens=16, temperature=0, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions_of_several_prompts(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=3, temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    with client.completions.create(model=MODEL, prompt="One", max_tokens=3, temperature=0, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == texts[0]


def test_an_echo_is_scored(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Heave ho", max_tokens=0, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "Heave ho" and logprobs is not None
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:] if value is not None)


def test_responses(client: OpenAI) -> None:
    whole = client.responses.create(
        model=MODEL, instructions=TURNS[0]["content"], input=TURNS[1]["content"], temperature=0, max_output_tokens=24
    )
    chat = client.chat.completions.create(model=MODEL, messages=TURNS, temperature=0, max_completion_tokens=24)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.input_tokens_details.cached_tokens > 0
    following = client.responses.create(
        model=MODEL,
        input=[*TURNS, *(item.to_dict() for item in whole.output), {"role": "user", "content": "And?"}],
        temperature=0,
        max_output_tokens=4,
        store=False,
    )
    assert following.usage is not None
    assert following.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens


def test_responses_as_a_stream(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Land?", temperature=0, max_output_tokens=12)
    with client.responses.stream(model=MODEL, input="Land?", temperature=0, max_output_tokens=12) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text and last.response.status == whole.status
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


class Course(BaseModel):
    """What even random weights must say in one of four ways."""

    model_config = ConfigDict(extra="forbid")
    heading: Literal["north", "south"]
    sails: Literal["set", "furled"]


STEER = {"name": "steer", "description": "Change the course.", "parameters": Course.model_json_schema()}


def test_structured_outputs_are_parsed(client: OpenAI) -> None:
    chat = client.chat.completions.parse(model=MODEL, messages=TURNS, response_format=Course, max_completion_tokens=200)
    assert isinstance(chat.choices[0].message.parsed, Course)
    response = client.responses.parse(model=MODEL, input="Where to?", text_format=Course, max_output_tokens=200)
    assert isinstance(response.output_parsed, Course)
    for extra in ({"regex": "(north|south)ward"}, {"choice": ["aye", "nay"]}):
        answer = client.completions.create(
            model=MODEL, prompt="Where?", max_tokens=50, extra_body={"structured_outputs": extra}
        )
        assert answer.choices[0].text in ("northward", "southward", "aye", "nay")


def test_a_tool_is_called_and_its_result_goes_back(client: OpenAI) -> None:
    tools = [{"type": "function", "function": STEER}]
    body = {"model": MODEL, "tools": tools, "max_completion_tokens": 200}
    answer = client.chat.completions.create(messages=TURNS, tool_choice="required", parallel_tool_calls=False, **body)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "steer"
    Course.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Steady as she goes."}
    turns = [*TURNS, message.to_dict(), result]
    after = client.chat.completions.create(messages=turns, tool_choice="none", **body | {"max_completion_tokens": 4})
    assert after.choices[0].message.tool_calls is None and after.usage is not None
    with client.chat.completions.stream(
        messages=TURNS, tool_choice={"type": "function", "function": {"name": "steer"}}, **body
    ) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    Course.model_validate_json(streamed.function.arguments)


def test_a_function_is_called_in_a_response(client: OpenAI) -> None:
    body = {"model": MODEL, "tools": [{"type": "function", **STEER}], "max_output_tokens": 200}
    whole = client.responses.create(input="Turn!", tool_choice={"type": "function", "name": "steer"}, **body)
    (call,) = whole.output
    assert call.type == "function_call"
    Course.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}
    turns = [{"role": "user", "content": "Turn!"}, call.to_dict(), result]
    after = client.responses.create(input=turns, tool_choice="none", **body | {"max_output_tokens": 4})
    assert after.output[0].type == "message"
    with client.responses.stream(input="Turn!", tool_choice="required", parallel_tool_calls=False, **body) as stream:
        events = list(stream)
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    Course.model_validate_json(done.arguments)


def test_errors_are_exceptions_that_name_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
