"""The official client: what it sends is taken, what it parses is right, errors become its exceptions."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import Running, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "pagekv"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}], temperature=0)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    logprobs = [
        each for chunk in chunks[:-1] if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or []
    ]
    assert [each.token for each in logprobs] == ["h", "e", "l", "l", "o", "<eos>"]
    assert len(logprobs[0].top_logprobs) == 2


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["a", "b"], max_tokens=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["he", "he"]
    assert answer.choices[1].logprobs is not None and answer.choices[1].logprobs.tokens == ["h", "e"]


def test_completion_stream(client: openai.OpenAI) -> None:
    with client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=3, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "hel"


def test_raw_extras_of_the_body(client: openai.OpenAI, server: Running) -> None:
    client.completions.create(model="toy", prompt="a", extra_body={"top_k": 3, "min_p": 0.1, "ignore_eos": True})
    assert server.engine.submitted[-1].params.top_k == 3


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="toy", prompt="x", best_of=3)
    assert bad.value.param == "best_of"
    with pytest.raises(openai.BadRequestError, match="'logit_bias.five'"):
        client.completions.create(model="toy", prompt="x", logit_bias={"five": 1})
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"


def test_errors_of_the_engine() -> None:
    with (
        serve(fail_at=lambda _: 2) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="the step failed"):
            client.completions.create(model="toy", prompt="x")
        with (
            pytest.raises(openai.APIError, match="the step failed"),
            client.completions.create(model="toy", prompt="x", stream=True) as stream,
        ):
            list(stream)
