"""Where texts are worked on: short ones on threads of the server, what may take long in processes.

    chat templates                          one process, 1 s and 256 MiB for each conversation
    texts of up to SHORT characters         threads of the server
    texts of up to LONG characters          one process
    longer ones                             another, so that the others do not wait for them

A process is started when it is first needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import orjson

from server.text.chat_template import NO_TEMPLATE, Forms, Rendered, TemplateSource
from server.text.encoding import Encoded, EncodeJob, TextEncoder
from server.text.lane import Lane
from server.text.limits import MIB, Limits
from server.text.process import JobRefused, OverMemory, OverTime, TextProcess, TextProcessError
from server.text.worker import tokens_json, unpack

Json = dict[str, Any]
Result = TypeVar("Result")

THREADS = 2
SHORT = 2**15  # characters; at worst (digits) 0.1 s and 16 MB on a thread
LONG = 2**18
TEMPLATE_LIMITS = Limits(seconds=1, memory=256 * MIB, kept=64 * MIB)
LONG_LIMITS = Limits(seconds=20, memory=512 * MIB, kept=64 * MIB)
LONGER_LIMITS = Limits(seconds=60, memory=2048 * MIB, kept=0)  # its memory is always given back

log = logging.getLogger("pagekv")


class TemplateBroken(Exception):
    """The chat template can render nothing; the message says why."""


class TokenizerLike(Protocol):
    """What is wanted of a Tokenizer."""

    encoder: TextEncoder

    @property
    def template_source(self) -> TemplateSource | None: ...
    def encode_job(self, job: EncodeJob) -> Encoded: ...


class TextService:
    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._templates = Lane("templates", self._template_setup, TEMPLATE_LIMITS)
        self._long = Lane("long texts", self._encoder_setup, LONG_LIMITS)
        self._longer = Lane("longer texts", self._encoder_setup, LONGER_LIMITS)
        self._trying = asyncio.Lock()
        self._forms: Forms | None = None  # unknown until the template was tried
        self._broken: str | None = None

    def close(self) -> None:
        """Waits for nothing; whoever waits for a text gets Stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for lane in (self._templates, self._long, self._longer):
            lane.close()

    async def warm_up(self) -> None:
        """Start the process for chat templates, and say in the log if the model's is of no use."""
        if self._tokenizer.template_source is None:
            return
        try:
            await self.try_template()
        except TemplateBroken as error:
            log.warning("%s Chat requests are refused; completions work.", error)
        except TextProcessError as error:
            log.warning("The process for chat templates did not start: %s", error)

    async def render(self, messages: Callable[[], Sequence[Json]], variables: Json) -> Rendered:
        """The conversation as the chat template spells it. `messages` makes it, on a thread.

        Raises TemplateBroken and TextProcessError.
        """
        forms = await self.try_template()
        answer = await self._templates.ask(
            lambda: orjson.dumps({"messages": messages(), "variables": variables, "forms": forms})
        )
        return Rendered(**orjson.loads(answer))

    async def try_template(self) -> Forms:
        """What forms the template takes; it is compiled and tried once. Raises TemplateBroken."""
        async with self._trying:
            if self._broken is not None:
                raise TemplateBroken(self._broken)
            if self._forms is None:
                await self._compile()
                self._forms = await self._find_forms()
            return self._forms

    async def _compile(self) -> None:
        if self._tokenizer.template_source is None:
            self._broken = NO_TEMPLATE
            raise TemplateBroken(self._broken)
        try:
            await self._templates.start()
        except (JobRefused, OverTime, OverMemory) as error:
            self._broken = str(uncompiled(error))
            raise TemplateBroken(self._broken) from error

    async def _find_forms(self) -> Forms:
        try:
            return Forms(**orjson.loads(await self._templates.ask(lambda: b"{}")))
        except (JobRefused, OverTime, OverMemory) as error:
            log.warning("The chat template fails on a short conversation: %s.", reason(error, TEMPLATE_LIMITS))
            return Forms()

    async def encode(self, job: EncodeJob) -> Encoded:
        """Raises TokenizerError and TextProcessError."""
        lane = self._lane_for(job.text)
        if lane is None:
            return await self.in_pool(lambda: self._tokenizer.encode_job(job))
        payload = await lane.ask(lambda: orjson.dumps(job))
        return await self.in_pool(lambda: unpack(payload))

    async def tokens_json(self, job: EncodeJob, *, with_names: bool) -> bytes:
        """The members of /tokenize's answer that may be large. Raises TokenizerError and TextProcessError."""
        lane = self._lane_for(job.text)
        if lane is None:
            return await self.in_pool(
                lambda: tokens_json(self._tokenizer.encoder, self._tokenizer.encode_job(job).ids, with_names=with_names)
            )
        return await lane.ask(lambda: orjson.dumps({**asdict(job), "as_json": {"with_names": with_names}}))

    async def in_pool(self, work: Callable[[], Result]) -> Result:
        """On a thread of the server: for work of a fraction of a second."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _lane_for(self, text: str) -> Lane | None:
        if len(text) <= SHORT:
            return None
        return self._long if len(text) <= LONG else self._longer

    def _template_setup(self) -> Json:
        return {"template": self._tokenizer.template_source}

    def _encoder_setup(self) -> Json:
        source = self._tokenizer.encoder.source()
        return {
            "encoder": {**asdict(source), "special_texts": {str(id): text for id, text in source.special_texts.items()}}
        }


def check_template(text: str) -> None:
    """Compile a chat template, in a process that ends with it. Raises TemplateBroken."""
    process = TextProcess(TEMPLATE_LIMITS)
    try:
        process.set_up({"template": TemplateSource(text, None, {}, ())})
    except TextProcessError as error:
        raise uncompiled(error) from error
    finally:
        process.end()


def uncompiled(error: TextProcessError) -> TemplateBroken:
    return TemplateBroken(f"The chat template does not compile: {reason(error, TEMPLATE_LIMITS)}.")


def limits_for(text: str) -> Limits:
    """Those of the process that encodes a text that is not short."""
    return LONG_LIMITS if len(text) <= LONG else LONGER_LIMITS


def reason(error: TextProcessError, limits: Limits) -> str:
    """Why a job has no result, as the end of a sentence."""
    if isinstance(error, OverTime):
        return f"it takes more than {limits.seconds:g} s of processor time"
    if isinstance(error, OverMemory):
        return f"it takes more than {limits.memory // MIB} MiB of memory"
    return str(error)
