"""/tokenize and /detokenize, what would be handed to the engine, and vLLM's small operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.server.real import RealServer, save_chat_model, serve_real

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "h\N{SNOWMAN}i"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    with serve_real(model) as running:
        yield running


def refused(server: RealServer, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=20)
    assert 400 <= response.status_code < 500, response.text
    return response.json()["error"]


def test_a_text(server: RealServer, model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(model)
    text = "a caf\N{LATIN SMALL LETTER E WITH ACUTE} and\N{SNOWMAN}"
    got = server.post("/tokenize", prompt=text)
    assert got["tokens"] == reference.encode(text)
    assert got["count"] == len(got["tokens"]) and got["max_model_len"] >= 128 and got["token_strs"] is None
    bare = server.post("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
    assert bare["tokens"] == reference.encode(text, add_special_tokens=False)
    assert bare["token_strs"] == reference.convert_ids_to_tokens(bare["tokens"])
    assert server.post("/detokenize", tokens=bare["tokens"])["prompt"] == text


def test_special_tokens_are_detokenized_as_they_are(server: RealServer, model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(model)
    ids = [reference.bos_token_id, *reference.encode("hi", add_special_tokens=False), reference.eos_token_id]
    assert server.post("/detokenize", tokens=ids)["prompt"] == reference.decode(ids)


def test_a_conversation(server: RealServer) -> None:
    got = server.post("/tokenize", messages=MESSAGES)
    assert server.post("/detokenize", tokens=got["tokens"])["prompt"] == (
        "<system>be kind<user>h\N{SNOWMAN}i<assistant>"
    )
    assert server.post("/v1/chat/completions/render", messages=MESSAGES)["token_ids"] == got["tokens"]


def test_what_is_rendered_is_what_is_computed(server: RealServer) -> None:
    (rendered,) = server.post("/v1/completions/render", prompt="one two three", max_tokens=3)
    assert rendered == {"model": "tiny", "token_ids": server.post("/tokenize", prompt="one two three")["tokens"]}
    usage = server.complete("one two three")["usage"]
    assert usage["prompt_tokens"] == len(rendered["token_ids"])
    assert server.cached(rendered["token_ids"]) == len(rendered["token_ids"]) - 1


def test_every_prompt_of_a_body_is_rendered(server: RealServer) -> None:
    made = server.post("/v1/completions/render", prompt=[[5, 6], [7]], model="tiny")
    assert [each["token_ids"] for each in made] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, "model"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "model": "nobody"}, "model"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/v1/completions/render", {"prompt": ""}, "prompt"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "best": 1}, "best"),
    ],
)
def test_what_is_refused(server: RealServer, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(server, path, **body)["param"] == param


def test_reset_prefix_cache(server: RealServer) -> None:
    prompt = list(range(40, 90))
    assert server.cached(prompt) == 0
    assert server.cached(prompt) == 49
    response = httpx.post(server.url + "/reset_prefix_cache")
    assert response.status_code == 200
    assert server.cached(prompt) == 0
    assert httpx.post(server.url + "/reset_prefix_cache?reset_external=true").status_code == 400


def test_the_load_is_that_of_requests_under_way(server: RealServer) -> None:
    def load() -> Any:
        return httpx.get(server.url + "/load").json()

    assert load() == {"server_load": 0}
    body = {"prompt": ["a", "b"], "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert load() == {"server_load": 2}
        for _ in lines:
            pass
    assert load() == {"server_load": 0}
