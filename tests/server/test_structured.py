"""Structured outputs over HTTP, by a tiny random model: what it says by itself is no JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from scheduler import guided, masks
from server.structured import body as structured
from server.structured import grammars
from tests.server.json_schemas import SCHEMAS, Schema
from tests.server.real import RealServer, serve_real
from tests.server.tiny_tokenizers import byte_level

SAY = [{"role": "user", "content": "Say something."}]
# What ends strings, objects and lists is likelier than chance would have it, and whitespace less likely.
BRIEF = {str(byte_level().convert_tokens_to_ids(token)): 6 for token in '"}]'}
BRIEF |= {str(byte_level().convert_tokens_to_ids(token)): -6 for token in "ĠĊčĉ"}
EVERYTHING = "(?s:.*)"


@pytest.fixture(scope="module")
def server(roomy_model: Path) -> Iterator[RealServer]:
    """With room for long answers: a model that draws at random takes its time to come to an end."""
    with serve_real(roomy_model, num_blocks=1024) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(server: RealServer, max_tokens: int = 1000, **fields: Any) -> Any:
    """The one choice of a chat, which must have ended by itself."""
    fixed = {"messages": SAY, "max_tokens": max_tokens, "seed": 0, "logit_bias": BRIEF}
    answer = server.post("/v1/chat/completions", **fixed | fields)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]


def schema_format(schema: Schema | bool, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def check(text: str, schema: Schema) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


def test_every_answer_fits_its_schema(server: RealServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda schema: chat(server, response_format=schema_format(schema)), SCHEMAS.values())
        for name, text in zip(SCHEMAS, answers, strict=True):
            check(text, SCHEMAS[name])


def test_without_them_there_is_no_json(server: RealServer) -> None:
    answer = server.post("/v1/chat/completions", messages=SAY, max_tokens=30, seed=0)
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer["choices"][0]["message"]["content"])


def test_each_kind(server: RealServer) -> None:
    regex = r"[0-9]{2}:[0-9]{2}( am| pm)"
    choices = ["één", "two words", 'th"ree']
    for seed in range(2):
        assert isinstance(json.loads(chat(server, response_format={"type": "json_object"}, seed=seed)), dict)
        assert re.fullmatch(regex, chat(server, structured_outputs={"regex": regex}, seed=seed))
        assert chat(server, structured_outputs={"choice": choices}, seed=seed) in choices
        lark = {"grammar": 'start: "a" start | "b"'}
        assert re.fullmatch("a*b", chat(server, structured_outputs=lark, seed=seed))
        gbnf = {"grammar": 'root ::= "x" | "(" root ")"'}
        assert re.fullmatch(r"\(*x\)*", chat(server, structured_outputs=gbnf, seed=seed))
        for spelling in (SCHEMAS["person"], json.dumps(SCHEMAS["person"])):
            check(chat(server, structured_outputs={"json": spelling}, seed=seed), SCHEMAS["person"])


def test_completions_have_them_as_well_and_choices_each_their_own_place(server: RealServer) -> None:
    asked = {"prompt": ["a", "b"], "n": 3, "max_tokens": 40, "seed": 1, "temperature": 2.0}
    answer = server.post("/v1/completions", structured_outputs={"regex": "[a-z]{3}[0-9]{3}"}, **asked)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 6 and all(re.fullmatch("[a-z]{3}[0-9]{3}", text) for text in texts)
    assert len(set(texts)) == 6


def test_a_grammar_that_allows_everything_changes_nothing(server: RealServer) -> None:
    letters = [token for token in range(350) if byte_level().decode([token]).isascii()]  # a text is no broken UTF-8
    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
        asked = {"prompt": "Once upon a time", "max_tokens": 40, "logprobs": 2, "allowed_token_ids": letters, **params}
        free = server.post("/v1/completions", **asked)["choices"][0]
        held = server.post("/v1/completions", structured_outputs={"regex": EVERYTHING}, **asked)["choices"][0]
        assert held["logprobs"]["tokens"] == free["logprobs"]["tokens"]
        assert held["text"] == free["text"] and held["logprobs"] == free["logprobs"]


def test_a_schema_is_taken_to_the_letter(server: RealServer) -> None:
    """A null in it is a value, and its depth is its own matter."""
    assert chat(server, response_format=schema_format({"enum": [None]})) == "null"
    assert json.loads(chat(server, structured_outputs={"json": {"const": {"a": None}}})) == {"a": None}
    deep: Schema = {"const": 1}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    check(chat(server, 4000, response_format=schema_format(deep)), deep)


def test_stop_strings_and_limits_still_end_a_text(server: RealServer) -> None:
    asked = {"messages": SAY, "seed": 0, "max_tokens": 20}
    digits = {"regex": "[0-9]{100}"}
    cut = server.post("/v1/chat/completions", structured_outputs=digits, **asked)["choices"][0]
    assert cut["finish_reason"] == "length" and len(cut["message"]["content"]) >= 20
    stop = cut["message"]["content"][7]
    ended = server.post("/v1/chat/completions", structured_outputs=digits, stop=stop, **asked)["choices"][0]
    assert ended["finish_reason"] == "stop" and ended["stop_reason"] == stop
    assert stop not in ended["message"]["content"]


def test_the_official_client_parses(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Who?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "p", "schema": SCHEMAS["person"], "strict": True},
        },
        max_completion_tokens=600,
        logit_bias=BRIEF,
        seed=0,
    )
    check(answer.choices[0].message.content or "", SCHEMAS["person"])
    with client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Who?"}],
        extra_body={"structured_outputs": {"json": SCHEMAS["unicode enum"]}},
        max_completion_tokens=600,
        logit_bias=BRIEF,
        seed=0,
        stream=True,
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    check(text, SCHEMAS["unicode enum"])


NAME = "response_format.json_schema.schema"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": schema_format({"type": "strin"})}, NAME, "strin"),
    ({"response_format": schema_format({"type": "array", "uniqueItems": True})}, NAME, "uniqueItems"),
    ({"response_format": schema_format({"pattern": "(", "type": "string"})}, NAME, "unclosed"),
    ({"response_format": schema_format({"x-guidance": {"lenient": True}})}, NAME, "x-guidance"),
    ({"response_format": schema_format(False)}, NAME, "no text matches"),
    ({"response_format": schema_format({"enum": ["x" * structured.MAX_TEXT]})}, NAME, "are the most"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema.name", "required"),
    ({"response_format": schema_format({}, name="no spaces")}, "response_format.json_schema.name", "pattern"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs.regex", "No text matches"),
    ({"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}, "structured_outputs.regex", "too many"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar", "nobody"),
    ({"structured_outputs": {"grammar": "gibberish"}}, "structured_outputs.grammar", "::="),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": "3"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"json": {"$ref": "#/gone"}}}, "structured_outputs.json", "gone"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "go with",
    ),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ({"guided_grammar": "a"}, "guided_grammar", "structured_outputs.grammar"),
]


@pytest.mark.parametrize(("fields", "param", "told"), BAD)
def test_a_bad_one_is_a_400_that_names_the_fault(
    server: RealServer, fields: dict[str, Any], param: str, told: str
) -> None:
    started = time.perf_counter()
    for path, prompt in (("/v1/chat/completions", {"messages": SAY}), ("/v1/completions", {"prompt": "x"})):
        answer = httpx.post(server.url + path, json=prompt | fields, timeout=30)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        assert told in error["message"], error
    assert time.perf_counter() - started < 20


def test_a_schema_too_deep_to_be_read_is_refused(server: RealServer) -> None:
    deep = b'{"items":' * 600 + b"{}" + b"}" * 600
    raw = b'{"messages":[{"role":"user","content":"x"}],"structured_outputs":{"json":' + deep + b"}}"
    answer = httpx.post(
        server.url + "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == 400 and "deep" in answer.json()["error"]["message"]


def test_a_grammar_that_waits_too_long_for_others_is_not_the_clients_fault(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.complete("x", 1, structured_outputs={"regex": "a"})  # so that the vocabulary is told
    monkeypatch.setattr(grammars, "PATIENCE", 0.0)
    body: dict[str, Any] = {"prompt": "x", "structured_outputs": {"regex": "never seen before"}}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammars_busy")
    assert int(answer.headers["retry-after"]) > 0
    monkeypatch.undo()
    monkeypatch.setattr(guided, "MAX_WORK_AHEAD", -1.0)
    body["structured_outputs"] = {"regex": "not seen before this either"}
    answer = httpx.post(
        server.url + "/v1/completions", json=body | {"structured_outputs": {"regex": "new"}}, timeout=30
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammars_busy")
    assert int(answer.headers["retry-after"]) > 0


def test_a_mask_that_gets_no_processor_is_a_503(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = guided.Guides._advance

    def slow(guides: guided.Guides, guide: guided.Guide, unseen: list[int]) -> Any:
        time.sleep(0.3)
        return advance(guides, guide, unseen)

    collect = masks.PendingMasks.collect
    monkeypatch.setattr(guided.Guides, "_advance", slow)
    monkeypatch.setattr(masks.PendingMasks, "collect", lambda pending: collect(pending, 0.1))
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": SAY})):
        body = prompt | {"structured_outputs": {"regex": "[ab]{9}"}}
        answer = httpx.post(server.url + path, json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy"), answer.text
        assert int(answer.headers["retry-after"]) > 0


def test_others_go_on_while_a_large_one_is_compiled(server: RealServer) -> None:
    large: Schema = {"type": "object", "properties": {f"member {index}": {"type": "string"} for index in range(1500)}}
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(
            httpx.post,
            server.url + "/v1/chat/completions",
            json={"messages": SAY, "max_tokens": 5, "response_format": schema_format(large)},
            timeout=60,
        )
        served = 0
        while not compiling.done():
            server.complete("x", 1)
            served += 1
    assert compiling.result().status_code in (200, 400)
    assert served > 2  # else they would have come after it
