"""The bridge between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler.commands import AdapterInfo, ListAdapters, UnloadAdapter
from scheduler.messages import (
    CacheReport,
    FinishReason,
    GenerationRequest,
    PromptUsage,
    RequestOutput,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from server.async_engine import AsyncEngine, OutputStream
from server.errors import BadRequest, EngineFailure, Unavailable
from tests.server.fake_engine import HELLO, FakeEngine


def request(name: str, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens, seed=0))


class Recorder:
    """An observer that keeps what it saw."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, FinishReason]] = []
        self.steps = 0

    def step(self, _: StepOutput) -> None:
        self.steps += 1

    def finished(self, request: GenerationRequest, _: RequestOutput, reason: FinishReason) -> None:
        self.ends.append((request.request_id, reason))


@asynccontextmanager
async def bridge(**options: Any) -> AsyncIterator[tuple[AsyncEngine, FakeEngine, Recorder]]:
    made: list[FakeEngine] = []

    def make(deliver: Callable[[StepOutput], None]) -> FakeEngine:
        made.append(FakeEngine(deliver, **options))
        return made[0]

    recorder = Recorder()
    engine = AsyncEngine(make, recorder)
    engine.start()
    engine.attach()
    try:
        yield engine, made[0], recorder
    finally:
        await engine.stop()


async def tokens_of(engine: AsyncEngine, requests: Sequence[GenerationRequest]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    with engine.generate(requests) as stream:
        async for index, output in stream:
            tokens.setdefault(index, []).extend(output.token_ids)
    return tokens


async def settled(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.002)


def test_one_terminal_event_each() -> None:
    async def main() -> None:
        async with bridge() as (engine, _, recorder):
            tokens = await asyncio.gather(*(tokens_of(engine, [request(f"a{n}"), request(f"b{n}")]) for n in range(20)))
            assert all(each == {0: list(HELLO(request("x"))), 1: list(HELLO(request("x")))} for each in tokens)
            assert len(recorder.ends) == 40 and {reason for _, reason in recorder.ends} == {FinishReason.STOP}
            assert engine.num_live == 0

    asyncio.run(main())


def test_a_busy_reader_gets_merged_outputs() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: range(100)) as (engine, fake, recorder):
            with engine.generate([request("a")]) as stream:
                await settled(lambda: recorder.ends != [])
                outputs = [output async for _, output in stream]
            assert len(outputs) == 1
            assert outputs[0].token_ids == tuple(range(100))
            assert outputs[0].finish_reason is FinishReason.LENGTH
            assert outputs[0].usage is not None and outputs[0].num_generated == 100
            assert fake.aborted == []

    asyncio.run(main())


def test_tokens_made_before_a_failure_are_read_before_it() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: range(100), fail_at=lambda _: 5) as (engine, _, recorder):
            with engine.generate([request("a")]) as stream:
                await settled(lambda: recorder.ends != [])
                outputs = [output async for _, output in stream]
            assert [output.token_ids for output in outputs] == [(0, 1, 2, 3, 4), ()]
            assert [output.finish_reason for output in outputs] == [None, FinishReason.ERROR]

    asyncio.run(main())


def test_what_comes_with_the_first_token_is_kept_when_outputs_are_merged() -> None:
    usage = PromptUsage(3, reused=0, copied=0, pending=0, computed=3)
    report = CacheReport(3, 0, ((0, 3),), 0, 0, 0, 0, ())
    scored = (None, TokenLogprobs(2, -0.5, 1), TokenLogprobs(3, -0.5, 1))
    first = RequestOutput("a", (65,), usage=usage, report=report, prompt_logprobs=scored, time_to_first_token=0.25)

    async def run() -> RequestOutput:
        async with bridge() as (engine, _, _):
            stream = OutputStream(engine, 1)
            for output in (first, RequestOutput("a", (66,)), RequestOutput("a", (67,), num_generated=3)):
                stream.push(0, output)
            return (await anext(stream))[1]

    merged = asyncio.run(run())
    assert (merged.token_ids, merged.num_generated) == ((65, 66, 67), 3)
    assert (merged.usage, merged.report, merged.prompt_logprobs) == (usage, report, scored)
    assert merged.time_to_first_token == 0.25


def test_commands() -> None:
    async def run() -> None:
        async with bridge() as (engine, fake, _):
            assert await engine.command(ListAdapters(), tuple) == ()
            with pytest.raises(BadRequest, match="does not know UnloadAdapter") as refused:
                await engine.command(UnloadAdapter("x"), AdapterInfo)
            assert refused.value.param == "adapter"
            with pytest.raises(TypeError, match="answered with tuple where AdapterInfo was due"):
                await engine.command(ListAdapters(), AdapterInfo)
            fake.die()
            with pytest.raises(EngineFailure, match="died"):
                await engine.command(ListAdapters(), tuple)
            await engine.stop()
            with pytest.raises(Unavailable):
                await engine.command(ListAdapters(), tuple)

    asyncio.run(run())


def test_cancelling_the_reader_aborts() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: [65], interval=0.002) as (engine, fake, recorder):
            task = asyncio.create_task(tokens_of(engine, [request("a", 10_000)]))
            await settled(lambda: fake.num_running == 1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await settled(lambda: engine.num_live == 0)
            assert recorder.ends == [("a", FinishReason.ABORT)]

    asyncio.run(main())


def test_finish_counts_as_stop_and_says_nothing_more() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: [65], interval=0.002) as (engine, fake, recorder):
            with engine.generate([request("a", 10_000)]) as stream:
                async for index, _ in stream:
                    stream.finish(index)
            await settled(lambda: engine.num_live == 0)
            assert fake.aborted == ["a"]
            assert recorder.ends == [("a", FinishReason.STOP)]

    asyncio.run(main())


def test_a_dead_engine_ends_every_stream() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: [65], interval=0.002) as (engine, fake, recorder):
            with engine.generate([request("a", 10_000), request("b", 10_000)]) as stream:
                await asyncio.to_thread(fake.die)
                ends = [output async for _, output in stream if output.finish_reason is not None]
            assert [output.finish_reason for output in ends] == [FinishReason.ERROR] * 2
            assert len(recorder.ends) == 2 and not engine.alive
            with pytest.raises(EngineFailure):
                engine.generate([request("c")])

    asyncio.run(main())


def test_stopping_ends_every_stream_and_refuses_new_requests() -> None:
    async def main() -> None:
        async with bridge(script=lambda _: [65], interval=0.002) as (engine, _, recorder):
            with engine.generate([request("a", 10_000)]) as stream:
                await engine.stop()
                ends = [output.finish_reason async for _, output in stream if output.finish_reason is not None]
            assert ends == [FinishReason.ABORT] and recorder.ends == [("a", FinishReason.ABORT)]
            with pytest.raises(Unavailable):
                engine.generate([request("b")])

    asyncio.run(main())


def test_the_loop_stays_free_while_steps_pour_in() -> None:
    """Steps that come faster than the loop runs are taken together, in one callback."""

    async def main() -> None:
        async with bridge(script=lambda _: [65]) as (engine, _, recorder):
            task = asyncio.create_task(tokens_of(engine, [request(f"r{n}", 300) for n in range(8)]))
            longest, loop = 0.0, asyncio.get_running_loop()
            while not task.done():
                before = loop.time()
                await asyncio.sleep(0)
                longest = max(longest, loop.time() - before)
            assert sum(map(len, (await task).values())) == 8 * 300
            assert recorder.steps >= 300
            assert longest < 0.5

    asyncio.run(main())
