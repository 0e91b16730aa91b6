"""Templates that run away and texts that take long: ended by what they cost, their client told, nobody held up."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import psutil
import pytest

from server.errors import ApiError, BadRequest, Unavailable
from server.prepare import chat_of
from server.prompt import Chat, PromptEncoder
from server.protocol import ChatBody
from server.text import service
from server.text.encoding import EncodeJob
from server.text.limits import MIB, Limits
from server.text.service import SHORT
from tests.server.harness import until
from tests.server.test_prompt import encoder, run, tokenizer
from tests.server.tiny_tokenizers import byte_level, sentencepiece

RUNAWAY = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long output": "{% for a in range(99999) %}{% for b in range(999) %}{{ messages }}{% endfor %}{% endfor %}",
    "string": "{{ ('x' * (300000000 + messages | length)) | length }}",
    "padded": "{{ messages[0].content.ljust(3000000000) }}",
    "format": "{{ '%3000000000d' | format(1) }}",
    "doubled": "{% set n = namespace(s='x') %}{% for a in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "list": "{{ (messages * 300000000) | length }}",
    "power": "{{ (9 + messages | length) ** (9 ** 9) }}",
}
HELLO = Chat(ChatBody.model_validate({"messages": [{"role": "user", "content": "Hello"}]}).messages)
KIND = "{% if kind == 'bad' %}" + RUNAWAY["nested ranges"] + "{% endif %}{{ messages[0].content }}"


def bad_chat() -> Chat:
    return chat_of(
        ChatBody.model_validate(
            {"messages": [{"role": "user", "content": "Hello"}], "chat_template_kwargs": {"kind": "bad"}}
        )
    )


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def outcome(work: Coroutine[Any, Any, Any]) -> Any:
    """What came of it, an error included."""
    try:
        return await work
    except ApiError as error:
        return error


@pytest.mark.parametrize("text", RUNAWAY.values(), ids=RUNAWAY)
def test_a_template_that_runs_away_is_the_clients_error(text: str) -> None:
    own = psutil.Process().memory_info().rss
    spent = os.times()
    with encoder(tokenizer(template=text)) as prompts:
        for _ in range(2):
            with pytest.raises(BadRequest, match="chat template .* takes more than (1 s|256 MiB)") as refused:
                run(prompts.chat(HELLO))
            assert refused.value.param == "messages"
        assert run(prompts.prompts("Hello")), "completions work"
    used = os.times()
    assert used.children_user + used.children_system - spent.children_user - spent.children_system < 6
    assert psutil.Process().memory_info().rss - own < 64 * MIB, "nothing of it is in the server"


@pytest.mark.parametrize("text", ["{{ 9 ** (9 ** 9) }}", "{% for %}", "{{ messages | nothing }}"])
def test_a_template_that_does_not_compile(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with encoder(tokenizer(template=text)) as prompts:
        run(prompts.warm_up())
        assert "does not compile" in caplog.text and "Chat requests are refused; completions work." in caplog.text
        with pytest.raises(BadRequest, match="chat template does not compile") as refused:
            run(prompts.chat(HELLO))
        assert refused.value.param == "messages"
        assert run(prompts.prompts("Hello"))


def test_others_are_served_while_and_after_one_runs_away() -> None:
    async def work(prompts: PromptEncoder) -> None:
        await prompts.chat(HELLO)
        bad = asyncio.ensure_future(outcome(prompts.chat(bad_chat())))
        await asyncio.sleep(0.1)
        assert (await prompts.prompts("Hello"))[0].token_ids and not bad.done(), "no tokenizer thread is held"
        assert (await prompts.chat(HELLO)).token_ids
        assert isinstance(await bad, BadRequest)

    with encoder(tokenizer(template=KIND)) as prompts:
        run(work(prompts))


@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves_ends_its_job(queued: bool) -> None:
    async def work(prompts: PromptEncoder) -> None:
        await prompts.chat(HELLO)
        first = asyncio.ensure_future(outcome(prompts.chat(bad_chat())))
        second = asyncio.ensure_future(outcome(prompts.chat(bad_chat())))
        await asyncio.sleep(0.1)
        leaving = [second, first] if queued else [first, second]
        for each in leaving:
            each.cancel()
        began = os.times()
        assert (await prompts.chat(HELLO)).token_ids
        used = os.times()
        assert used.children_user - began.children_user < 0.9, "neither job ran to its limit"

    with encoder(tokenizer(template=KIND)) as prompts:
        run(work(prompts))


def test_closing_waits_for_no_job_and_leaves_no_process() -> None:
    before = children(), threading.active_count()

    async def work() -> Any:
        with encoder(tokenizer(template=KIND)) as prompts:
            await prompts.chat(HELLO)
            bad = asyncio.ensure_future(outcome(prompts.chat(bad_chat())))
            await asyncio.sleep(0.1)
            began = time.monotonic()
        assert time.monotonic() - began < 0.5
        return await bad

    assert isinstance(run(work()), Unavailable)
    until(lambda: (children(), threading.active_count()) == before)


def test_a_process_that_was_killed_is_started_again() -> None:
    with encoder(tokenizer()) as prompts:
        before = children()
        first = run(prompts.chat(HELLO))
        for pid in children() - before:
            psutil.Process(pid).kill()
        until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in children() - before))
        assert run(prompts.chat(HELLO)) == first


# -- long texts


@pytest.fixture
def close_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few characters are long, and of a few more longer."""
    monkeypatch.setattr(service, "SHORT", 8)
    monkeypatch.setattr(service, "LONG", 100)


TEXTS = ["Hello there", "été 中文 😀 " * 5, "<|im_start|> the <|begin|>x", "<s>" + "Hello " * 40, "  \n padded" * 30]


@pytest.mark.usefixtures("close_limits")
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_long_texts_have_the_same_tokens(make: Any, text: str) -> None:
    made = tokenizer(make)
    expected = made.encode_job(EncodeJob(text, with_offsets=True))
    with encoder(made) as prompts:
        (whole,) = run(prompts.prompts(text, echo=True))
        (kept,) = run(prompts.prompts(text, echo=True, keep=2))
        said = Chat(ChatBody.model_validate({"messages": [{"role": "user", "content": text}]}).messages)
        chat = run(prompts.chat(said))
        assert run(prompts.count(said)) == len(chat.token_ids)
    assert whole.token_ids == tuple(expected.ids) and whole.echo is not None and whole.echo.text == text
    assert whole.echo.offsets == tuple(expected.offsets)
    assert kept.token_ids == whole.token_ids[-2:] and kept.echo is not None
    assert kept.echo.text == text[expected.offsets[-2] :]
    assert list(chat.token_ids) == made.apply_chat_template([{"role": "user", "content": text}])


@pytest.mark.usefixtures("close_limits")
def test_a_text_that_takes_too_long_or_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = "1" * 300_000
    monkeypatch.setattr(service, "LONGER_LIMITS", Limits(seconds=0.05, memory=2048 * MIB, kept=0))
    with encoder(tokenizer()) as prompts:
        with pytest.raises(BadRequest, match=r"Invalid 'prompt': .* takes more than 0.05 s of processor") as refused:
            run(prompts.tokens_json(digits, add_special_tokens=True, with_names=False))
        assert refused.value.param == "prompt"
    monkeypatch.setattr(service, "LONGER_LIMITS", Limits(seconds=30, memory=24 * MIB, kept=0))
    with encoder(tokenizer()) as prompts:
        with pytest.raises(BadRequest, match="takes more than 24 MiB of memory"):
            run(prompts.tokens_json(digits, add_special_tokens=True, with_names=False))
        assert run(prompts.prompts("Hello there")), "in the other process"


def test_memory_is_given_back() -> None:
    """A process that keeps more than it may ends after its answer; the server itself keeps next to nothing."""
    own = psutil.Process().memory_info().rss
    with encoder(tokenizer()) as prompts:
        before = children()
        answer = run(prompts.tokens_json("1 " * 2**17 + "x", add_special_tokens=False, with_names=True))
        assert answer.startswith(b'"count":262145,"tokens":[') and b'"token_strs":["1",' in answer
        until(lambda: children() == before)
    assert psutil.Process().memory_info().rss - own < 64 * MIB


def test_a_short_text_starts_no_process() -> None:
    with encoder(tokenizer(), max_model_len=2**20) as prompts:
        before = children()
        run(prompts.prompts("1" * SHORT))
        assert children() == before
        run(prompts.prompts("1" * (SHORT + 1)))
        assert len(children() - before) == 1
