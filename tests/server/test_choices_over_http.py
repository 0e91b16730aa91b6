"""Several choices of a prompt over HTTP and a real engine: what each says, and what the prompt cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.real import RealServer, save_chat_model, serve_real

PROMPT = [5 + 3 * position % 90 for position in range(40)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path)
    with serve_real(path) as running:
        yield running


def ids_of(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def computed(server: RealServer) -> int:
    """Positions of prompts computed so far, by all requests."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return int(float(next(line for line in lines if 'source="computed"' in line).rpartition(" ")[2]))


def ask(server: RealServer, **fields: Any) -> Any:
    fixed = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    return server.post("/v1/completions", **(fixed | fields))


def test_the_prompt_is_computed_once_and_counted_once(server: RealServer) -> None:
    before = computed(server)
    answer = ask(server, n=5, cache_salt="once")
    assert computed(server) - before == 40 + 4, "and the last position by each of the others"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 30)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "of what the first choice found"
    assert len({tuple(ids) for ids in ids_of(answer)}) == 5


def test_the_first_choice_is_the_only_one_of_n_1(server: RealServer) -> None:
    assert ids_of(ask(server, n=3))[0] == ids_of(ask(server))[0]
    assert ids_of(ask(server, n=3)) == ids_of(ask(server, n=3)), "and a seed is a seed"


def test_greedy_choices_are_alike(server: RealServer) -> None:
    assert len({tuple(ids) for ids in ids_of(ask(server, n=3, temperature=0))}) == 1


def test_a_first_choice_that_ends_at_once_leaves_the_others_alone(server: RealServer) -> None:
    alone = ask(server, n=4)
    first, *others = ids_of(alone)
    assert all(first[0] not in ids for ids in others)
    answer = ask(server, n=4, stop_token_ids=first[:1], cache_salt="stops")
    assert ids_of(answer) == [first[:1], *others]


def test_a_scored_prompt_is_scored_once(server: RealServer) -> None:
    fields = {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "cache_salt": "scored"}
    before = computed(server)
    answer = ask(server, n=3, **fields)
    assert computed(server) - before == 40 + 2
    (single,) = ask(server, **fields)["choices"]
    for choice in answer["choices"]:
        assert choice["prompt_logprobs"] == single["prompt_logprobs"]
        assert choice["logprobs"]["token_logprobs"][:40] == single["logprobs"]["token_logprobs"][:40]
        assert len(choice["logprobs"]["tokens"]) == 46


def test_a_request_that_comes_to_leave_itself_no_token_is_told_so_and_no_fault_of_the_servers(
    server: RealServer,
) -> None:
    letters = server.post("/tokenize", prompt="~~", add_special_tokens=False)["tokens"]
    assert len(letters) == 2 and letters[0] == letters[1]
    body = {"prompt": "x", "max_tokens": 4, "allowed_token_ids": letters, "bad_words": ["~~"], "n": 2}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "unmeetable_request")
    assert "allowed_token_ids and bad_words leave no token to choose" in error["message"]
    lines = httpx.post(server.url + "/v1/completions", json=body | {"stream": True}, timeout=60).text.split("\n\n")
    assert '"text":"~"' in lines[0] and "unmeetable_request" in lines[-3] and lines[-2] == "data: [DONE]"
    assert ask(server)["choices"][0]["token_ids"], "others go on"


def test_tokens_that_the_grammar_does_not_know_leave_nothing(server: RealServer) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "[ab]{3}"}, "allowed_token_ids": [PROMPT[0]]}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "allowed_token_ids and the grammar leave" in answer.json()["error"]["message"]
