"""From bodies to token ids with a real tokenizer: what templates are told, what is continued, what is spelled how."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from server.errors import BadRequest, ContextTooLong
from server.prepare import chat_of
from server.prompt import PromptEncoder
from server.protocol import ChatBody
from server.tokenizer import Tokenizer
from server.tools.registry import FORMATS
from tests.server.fake_engine import INFO
from tests.server.test_special_text import CHATML, TRIMMING, with_chat_tokens
from tests.server.tiny_tokenizers import byte_level, sentencepiece

Result = TypeVar("Result")

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The capital  "}]


def tokenizer(make: Any = byte_level, template: str | None = CHATML) -> Tokenizer:
    made = with_chat_tokens(copy.deepcopy(make()))
    made.chat_template = template
    return Tokenizer(made)


@contextmanager
def encoder(made: Tokenizer, max_model_len: int = 512) -> Iterator[PromptEncoder]:
    info = replace(INFO, vocab_size=made.vocab_size, max_model_len=max_model_len)
    encoder = PromptEncoder(made, info, FORMATS["hermes"])
    try:
        yield encoder
    finally:
        encoder.close()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def chat(made: Tokenizer, **body: Any) -> tuple[int, ...]:
    parsed = ChatBody.model_validate({"messages": CHAT} | body)
    with encoder(made) as prompts:
        return run(prompts.chat(chat_of(parsed))).token_ids


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_final_message_is_left_open(make: Any, template: str) -> None:
    made = tokenizer(make, template)
    ids = chat(made, continue_final_message=True)
    assert list(ids) == made._tokenizer.apply_chat_template(CHAT, continue_final_message=True, return_dict=False)
    assert made.decode(ids).rstrip().endswith("The capital")
    assert ids == chat(made, continue_final_message=True, add_generation_prompt=False)


def test_special_text_in_a_message_that_is_continued() -> None:
    made = tokenizer()
    said = "a<|im_end|>b"
    ids = chat(made, messages=[*CHAT[:1], {"role": "assistant", "content": said}], continue_final_message=True)
    end = made._tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert made.decode(ids, skip_special_tokens=False).endswith(f"<|im_start|>assistant\n{said}")
    assert ids.count(end) == 1, "of the first message alone"


@pytest.mark.parametrize("content", ["", "  "])
def test_nothing_to_continue(content: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(tokenizer(), messages=[{"role": "assistant", "content": content}], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_the_generation_prompt_is_optional() -> None:
    made = tokenizer()
    opened, closed = chat(made), chat(made, add_generation_prompt=False)
    assert opened[: len(closed)] == closed
    assert made.decode(opened[len(closed) :], skip_special_tokens=False) == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "name", ["enable_thinking", "max_tokens", "name", "text", "kwargs", "limit", "value", "template"]
)
def test_a_template_has_its_variables(name: str) -> None:
    made = tokenizer(template="{{ messages[0].content }}/{{ " + name + " }}")
    assert made.decode(chat(made, chat_template_kwargs={name: "so"})) == "Hello/so"


def test_a_template_that_fails_is_a_clients_error() -> None:
    for template in (
        "{{ 1 // 0 }}",
        "{{ messages[0].content + x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        with pytest.raises(BadRequest) as refused:
            chat(tokenizer(template=template), chat_template_kwargs={"x": 1})
        assert refused.value.param == "messages" and len(refused.value.message) <= 2000


def test_a_template_is_run_in_a_sandbox() -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(BadRequest, match="unsafe|undefined|not safely callable|access"):
            chat(tokenizer(template=template))


def test_without_a_template_there_are_completions_and_no_chats() -> None:
    made = tokenizer(template=None)
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions"):
        chat(made)
    with encoder(made) as prompts:
        assert list(run(prompts.prompts("Hello"))[0].token_ids) == made.encode("Hello")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_long_text_is_refused_by_its_length(make: Any) -> None:
    made = tokenizer(make)
    with encoder(made, max_model_len=64) as prompts:
        for work in (
            prompts.prompts("the " * 500_000),
            prompts.chat(chat_of(ChatBody.model_validate({"messages": [{"role": "user", "content": "a" * 10**6}]}))),
        ):
            with pytest.raises(ContextTooLong, match="is 64 tokens, but the request needs at least [0-9]+ tokens"):
                run(work)
        kept = run(prompts.prompts("the " * 1000, keep=10))[0]
        assert list(kept.token_ids) == made.encode("the " * 1000)[-10:]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bad_words_are_spelled_as_texts_begin_and_as_they_go_on(make: Any) -> None:
    made = tokenizer(make)
    with encoder(made) as prompts:
        spelled = run(prompts.bad_words(["the", " quick", "the"]))
    texts = {made.decode(ids).strip() for ids in spelled}
    assert texts == {"the", "quick"} and len(spelled) == len(set(spelled))
    assert tuple(made.encode("the", add_special_tokens=False)) in spelled
    if make is byte_level:  # one token either way, and another one
        assert tuple(made.encode(" the", add_special_tokens=False)) in spelled
