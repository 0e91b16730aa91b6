"""Takes the time of the parts of each engine step, from outside: the product knows nothing of it.

    python -m benchmarks.stopwatch RECORDS [--stand-in MS] serve ...     `pagekv serve ...`, watched

Methods are wrapped where they are looked up. Time belongs to the innermost part that is running, so parts add up to the
step. Two clocks: the wall's, and the engine thread's CPU clock, which stands still while that thread waits for the
interpreter's lock or for a core.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import scheduler.engine as engine_module
from cache.integrity import Integrity
from model.attention.torch_reference import TorchReference
from model.cpu.library import TIMES
from model.cpu.runner import CRunner
from model.inputs import StepInputs
from model.linear import Linear
from model.network import Network
from model.runner import Runner
from model.sampler import Sampler
from scheduler.batch import Batch
from scheduler.engine import Engine
from scheduler.guided import Guide, Guides, PendingMasks
from scheduler.scheduler import Scheduler

PARTS = (
    "schedule",
    "inputs",
    "linear",
    "attention",
    "elementwise",
    "head",
    "masks",  # of requests held to a grammar: handed to threads before the network, and waited for after it
    "sampler",
    "update",
    "other",  # of the step: copies, zeroing, gauges
    "idle",  # between two steps, while there was work: outputs are delivered, messages taken
)
NETWORK = ("linear", "attention", "elementwise", "head")
PLACES: tuple[tuple[Any, str, str], ...] = (
    (engine_module, "flatten", "inputs"),
    (engine_module, "sample_rows", "inputs"),
    (engine_module, "scored_tokens", "inputs"),
    (Linear, "__call__", "linear"),
    (TorchReference, "prepare", "attention"),
    (TorchReference, "write", "attention"),
    (TorchReference, "attend", "attention"),
    (Network, "_logits", "head"),
    (Runner, "run", "elementwise"),
    (Guides, "start", "masks"),
    (PendingMasks, "collect", "masks"),
    (Sampler, "sample", "sampler"),
    (Sampler, "score", "sampler"),
    (Scheduler, "update", "update"),
    (Integrity, "sign", "update"),
)
_OF_THE_C_BACKEND = {"rows": "elementwise"}


class Stopwatch:
    """One record a step: how many requests got a token and how, and seconds by part."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._parts: list[str] = []
        self._marks = (0.0, 0.0)
        self._ended: tuple[float, float, float] | None = None
        self._loop = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._step: dict[str, Any] = {}

    def timed(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if not self._parts or self._parts[-1] == "head":  # not within a step; the head is a product too
                    return function(*args, **kwargs)
                self._enter(part)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._leave()

            return wrapper

        return decorate

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Around Engine.step."""

        @functools.wraps(function)
        def wrapper(engine: Engine, *args: Any) -> Any:
            now = time.perf_counter(), time.thread_time()
            loop = time.clock_gettime(self._loop)
            self._step = {
                "requests": 0,
                "kind": "",
                "wall": dict.fromkeys(PARTS, 0.0),
                "cpu": dict.fromkeys(PARTS, 0.0),
            }
            if self._ended is not None:
                self._step["wall"]["idle"] = now[0] - self._ended[0]
                self._step["cpu"]["idle"] = now[1] - self._ended[1]
                self._step["loop"] = loop - self._ended[2]  # of the last step and the time after it
            self._marks, self._parts = now, ["other"]
            try:
                return function(engine, *args)
            finally:
                self._leave()
                if self._ended is not None and self._step["requests"]:
                    self.records.append(self._step)
                self._ended = (*self._marks, loop) if engine.has_work else None

        return wrapper

    def scheduled(self, function: Callable[..., Batch]) -> Callable[..., Batch]:
        """Around Scheduler.schedule: a record is made only of steps in which every request gets its next token."""

        @functools.wraps(function)
        def wrapper(*args: Any) -> Batch:
            self._enter("schedule")
            try:
                batch = function(*args)
            finally:
                self._leave()
            if batch.sampled and batch.num_tokens == len(batch.sampled):
                self._step["requests"] = len(batch.sampled)
                self._step["kind"] = kind_of(batch)
            return batch

        return wrapper

    def c_network(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Around the C backend's step, which takes the times of its parts itself."""

        @functools.wraps(function)
        def wrapper(runner: CRunner, *args: Any) -> Any:
            if not self._parts:  # the backend measures itself when it starts
                return function(runner, *args)
            self._enter("elementwise")
            try:
                result = function(runner, *args)
            finally:
                self._leave()
            for clock in ("wall", "cpu"):
                for name, seconds in zip(TIMES, runner.seconds, strict=True):
                    part = _OF_THE_C_BACKEND.get(name, name)
                    self._step[clock][part] += seconds
                    self._step[clock]["elementwise"] -= seconds
            return result

        return wrapper

    def _enter(self, part: str) -> None:
        self._mark()
        self._parts.append(part)

    def _leave(self) -> None:
        self._mark()
        self._parts.pop()

    def _mark(self) -> None:
        now = time.perf_counter(), time.thread_time()
        if self._parts:
            for clock, last, this in zip(("wall", "cpu"), self._marks, now, strict=True):
                self._step[clock][self._parts[-1]] += this - last
        self._marks = now


def kind_of(batch: Batch) -> str:
    params = batch.sampled[0].params
    if isinstance(batch.sampled[0].guide, Guide):
        return "guided"
    if params.temperature == 0.0:
        return "greedy"
    return "top_p" if params.top_p < 1.0 else "temperature"


@contextlib.contextmanager
def watch(stand_in: float | None = None) -> Iterator[Stopwatch]:
    """Everything is wrapped until this is left. With `stand_in`, seconds, the network is a sleep of that length and
    gives random logits, always the same: what lies around a network that fast can be measured on a machine that is
    not."""
    stopwatch = Stopwatch()
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original))

        for owner, name, part in PLACES:
            replace(owner, name, stopwatch.timed(part))
        replace(CRunner, "run", stopwatch.c_network)
        replace(Scheduler, "schedule", stopwatch.scheduled)
        replace(Engine, "step", stopwatch.step)
        if stand_in is not None:
            replace(Engine, "__init__", lambda load: loading_without_network(load, stopwatch, stand_in))
        yield stopwatch


def loading_without_network(load: Callable[..., None], stopwatch: Stopwatch, seconds: float) -> Callable[..., None]:
    @functools.wraps(load)
    def wrapper(engine: Engine, *args: Any, **kwargs: Any) -> None:
        load(engine, *args, **kwargs)
        noise = np.random.default_rng(0).normal(0, 3, (engine.info.max_num_seqs, engine.info.vocab_size))
        logits = torch.from_numpy(noise.astype(np.float32))

        def run(inputs: StepInputs) -> torch.Tensor:
            time.sleep(seconds)
            return logits[: inputs.logit_rows.shape[0]]

        timed = stopwatch.timed("elementwise")(run)
        stand_in: Any = SimpleNamespace(run=timed, rouse=lambda: None, numerics=engine.runner.numerics)
        engine.runner = stand_in

    return wrapper


def main() -> None:
    """The command of the module's docstring; the records go to a file when the server has ended."""
    records, *arguments = sys.argv[1:]
    stand_in = None
    if arguments[0] == "--stand-in":
        stand_in, arguments = float(arguments[1]) / 1e3, arguments[2:]
    sys.argv = ["pagekv", *arguments]
    with watch(stand_in) as stopwatch:
        try:
            from server.cli import main as pagekv

            pagekv()
        finally:
            Path(records).write_text(json.dumps(stopwatch.records), encoding="utf-8")


if __name__ == "__main__":
    main()
