"""A thin `/v1/completions` around OpenVINO's continuous batching, run by the peer's own Python:

    python openvino_server.py MODEL PORT THREADS KV_GIB [PROPERTY=VALUE ...]

Only what the benchmarks send is understood: token ids, greedy, streamed. It imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found,unused-ignore]
import openvino_genai  # type: ignore[import-not-found,unused-ignore]
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

BATCHED_TOKENS, SEQUENCES = 2048, 32


@dataclass(frozen=True)
class Job:
    """A request, and where its tokens go: (new token ids, is it the last time)."""

    prompt: list[int]
    config: Any
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[tuple[list[int], bool]]


def open_pipeline(model: str, threads: int, kv_gib: int, properties: dict[str, str]) -> Any:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = kv_gib
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = BATCHED_TOKENS
    scheduling.max_num_seqs = SEQUENCES
    scheduling.dynamic_split_fuse = True
    return openvino_genai.ContinuousBatchingPipeline(
        model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads, **properties}
    )


def step_for_ever(pipeline: Any, arriving: queue.Queue[Job]) -> None:
    """The engine's thread: takes up what has arrived, and sleeps when there is nothing to do."""
    numbers = itertools.count()
    running: dict[int, tuple[Any, Job]] = {}
    while True:
        try:
            while True:
                job = arriving.get(block=not running)
                number = next(numbers)
                tokens = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
                running[number] = (pipeline.add_request(number, tokens, job.config), job)
        except queue.Empty:
            pass
        pipeline.step()
        for number, (handle, job) in list(running.items()):
            new: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    new += list(output.generated_ids)
            ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if new or ended:
                job.loop.call_soon_threadsafe(job.out.put_nowait, (new, ended))
            if ended:
                del running[number]


def event(choices: list[dict[str, Any]], **more: Any) -> str:
    return f"data: {json.dumps({'id': 'c', 'choices': choices, **more})}\n\n"


def create_app(model: str, pipeline: Any) -> FastAPI:
    app = FastAPI()
    tokenizer = pipeline.get_tokenizer()
    arriving: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=step_for_ever, args=(pipeline, arriving), daemon=True).start()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": model}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        job = Job(body["prompt"], config, asyncio.get_running_loop(), asyncio.Queue())
        arriving.put(job)

        async def stream() -> AsyncIterator[str]:
            total, ended = 0, False
            while not ended:
                new, ended = await job.out.get()
                total += len(new)
                text = tokenizer.decode(new) if new else ""
                yield event([{"index": 0, "text": text, "finish_reason": "length" if ended else None}])
            usage = {"prompt_tokens": len(job.prompt), "completion_tokens": total}
            yield event([], usage=usage)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def main() -> None:
    model, port, threads, kv_gib, *properties = sys.argv[1:]
    pairs = dict(item.split("=", 1) for item in properties)
    pipeline = open_pipeline(model, int(threads), int(kv_gib), pairs)
    uvicorn.run(create_app(model, pipeline), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
