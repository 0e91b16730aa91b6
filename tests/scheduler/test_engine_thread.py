"""The engine on its own thread: what is submitted, aborted, stopped, from several threads, ends exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.runner import Runner
from scheduler.commands import CacheTarget, ChangeCache, CommandRefused, Operation, PlanPrompt
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.engine_thread import EngineGone, EngineThread
from scheduler.messages import FinishReason, GenerationRequest, SamplingParams, StepOutput
from scheduler.scheduler import Scheduler

TIMEOUT = 30.0


class Listener:
    """Collects what is delivered; `wait` until a number of requests have ended."""

    def __init__(self) -> None:
        self.steps: list[StepOutput] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, step: StepOutput) -> None:
        with self._changed:
            self.steps.append(step)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def ends(self) -> dict[str, list[FinishReason]]:
        ends: dict[str, list[FinishReason]] = {}
        for step in list(self.steps):
            for output in step.outputs:
                if output.finish_reason is not None:
                    ends.setdefault(output.request_id, []).append(output.finish_reason)
        return ends

    def tokens(self, name: str) -> list[int]:
        outputs = [output for step in self.steps for output in step.outputs if output.request_id == name]
        return [token for output in outputs for token in output.token_ids]

    def wait(self, count: int) -> dict[str, list[FinishReason]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends()) >= count, TIMEOUT), f"only {self.ends()}"
        return self.ends()

    def wait_for_token(self) -> None:
        with self._changed:
            said = lambda: any(output.token_ids for step in self.steps for output in step.outputs)  # noqa: E731
            assert self._changed.wait_for(said, TIMEOUT)


def config(checkpoint: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), dtype="float32", device="cpu", threads=1, num_blocks=40, **options)  # type: ignore[arg-type]


def request(name: str, length: int = 20, max_tokens: int = 5) -> GenerationRequest:
    prompt = tuple(random.Random(length).choices(range(3, 160), k=length))
    return GenerationRequest(name, prompt, SamplingParams(max_tokens, seed=0, temperature=0.0, ignore_eos=True))


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def thread(checkpoint: Path, listener: Listener) -> Iterator[EngineThread]:
    thread = EngineThread(config(checkpoint), listener, progress=False)
    thread.start()
    yield thread
    thread.stop()
    assert not thread.alive
    assert all(len(ends) == 1 for ends in listener.ends().values()), "somebody ended twice"


def test_a_request_from_beginning_to_end(thread: EngineThread, listener: Listener) -> None:
    assert thread.alive
    thread.submit(request("a"))
    assert listener.wait(1) == {"a": [FinishReason.LENGTH]}
    assert len(listener.tokens("a")) == 5
    assert listener.threads == {"pagekv-engine"}


def test_starting_tells_about_the_engine(checkpoint: Path, listener: Listener) -> None:
    thread = EngineThread(config(checkpoint), listener, progress=False)
    info = thread.start()
    assert info.num_blocks == 40 and info.vocab_size == 160
    thread.stop()
    assert not thread.alive


def test_starting_raises_what_loading_raises(tmp_path: Path, listener: Listener) -> None:
    (tmp_path / "config.json").write_text("{}")
    thread = EngineThread(config(tmp_path), listener, progress=False)
    with pytest.raises(Exception, match=r".+") as failure:
        thread.start()
    assert type(failure.value).__module__.startswith("model.")
    assert not thread.alive
    thread.submit(request("late"))
    assert listener.ends() == {"late": [FinishReason.ABORT]}
    thread.stop()


def test_a_refused_request_ends_too(thread: EngineThread, listener: Listener) -> None:
    thread.submit(request("empty", 0))
    thread.submit(request("too long", 600))
    assert listener.wait(2) == {"empty": [FinishReason.ERROR], "too long": [FinishReason.ERROR]}


def test_aborting_what_is_running_waiting_unknown_or_over(thread: EngineThread, listener: Listener) -> None:
    thread.submit(request("over"))
    listener.wait(1)
    for name in ("over", "unknown"):
        thread.abort(name)
    thread.submit(request("running", 20, 400))
    listener.wait_for_token()
    thread.abort("running")
    thread.abort("running")
    ends = listener.wait(2)
    assert ends == {"over": [FinishReason.LENGTH], "running": [FinishReason.ABORT]}
    assert "unknown" not in ends
    thread.submit(request("after"))
    assert listener.wait(3)["after"] == [FinishReason.LENGTH]


def test_many_threads_at_once(thread: EngineThread, listener: Listener) -> None:
    def client(number: int) -> None:
        rng = random.Random(number)
        for count in range(8):
            name = f"{number}.{count}"
            thread.submit(request(name, rng.randint(1, 60), rng.randint(1, 12)))
            if rng.random() < 0.4:
                thread.abort(name if rng.random() < 0.7 else f"{rng.randint(0, 5)}.{count}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(TIMEOUT)
    ends = listener.wait(48)
    assert len(ends) == 48 and all(len(end) == 1 for end in ends.values())
    assert {end[0] for end in ends.values()} <= {FinishReason.LENGTH, FinishReason.ABORT}
    assert listener.steps[-1].stats.blocks_in_use == 0


def test_stopping_ends_what_is_live(thread: EngineThread, listener: Listener) -> None:
    for number in range(20):  # more than run at once
        thread.submit(request(f"r{number}", 20 + number, 400))
    listener.wait_for_token()
    thread.stop()
    ends = listener.ends()
    assert len(ends) == 20 and all(end == [FinishReason.ABORT] for end in ends.values())
    assert listener.steps[-1].stats.blocks_in_use == 0
    thread.stop()


def test_stopping_from_the_thread_itself_does_not_wait_for_itself(checkpoint: Path) -> None:
    ended = threading.Event()

    def deliver(step: StepOutput) -> None:
        if any(output.finish_reason for output in step.outputs):
            thread.stop()
            ended.set()

    thread = EngineThread(config(checkpoint), deliver, progress=False)
    thread.start()
    thread.submit(request("a"))
    assert ended.wait(TIMEOUT)
    thread.stop()
    assert not thread.alive


def test_what_comes_after_the_end_ends_at_once(thread: EngineThread, listener: Listener) -> None:
    thread.submit(request("before"))
    listener.wait(1)
    thread.stop()
    thread.submit(request("after"))
    assert listener.ends()["after"] == [FinishReason.ABORT]
    assert listener.steps[-1].stats.generation_tokens == 5, "the counters are as they stood at the end"
    with pytest.raises(EngineGone):
        thread.call(PlanPrompt(request("x"))).result(TIMEOUT)
    thread.abort("after")


def test_stopping_while_others_submit(checkpoint: Path, listener: Listener) -> None:
    """Nothing falls between the last look into the inbox and the end."""
    thread = EngineThread(config(checkpoint), listener, progress=False)
    thread.start()
    going = threading.Barrier(4)

    def client(number: int) -> None:
        going.wait(TIMEOUT)
        for count in range(200):
            thread.submit(request(f"{number}.{count}", 3, 400))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for each in clients:
        each.start()
    going.wait(TIMEOUT)
    thread.stop()
    for each in clients:
        each.join(TIMEOUT)
    ends = listener.wait(600)
    assert len(ends) == 600 and all(len(end) == 1 for end in ends.values())


def test_the_threads_death_ends_everything(
    thread: EngineThread, listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread.submit(request("live", 20, 400))
    listener.wait_for_token()

    def die(self: Engine) -> StepOutput:
        raise SystemError("the engine itself is broken")

    monkeypatch.setattr(Engine, "step", die)
    assert listener.wait(1) == {"live": [FinishReason.ABORT]}
    thread._thread.join(TIMEOUT)
    assert not thread.alive and "the engine's thread died" in caplog.text
    thread.submit(request("late"))
    assert listener.ends()["late"] == [FinishReason.ABORT]


def test_a_listener_that_raises_does_not_leave_callers_waiting(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def deliver(step: StepOutput) -> None:
        raise ValueError("nobody listens")

    thread = EngineThread(config(checkpoint), deliver, progress=False)
    thread.start()
    thread.submit(request("a"))
    thread._thread.join(TIMEOUT)
    assert not thread.alive and "the last outputs could not be delivered" in caplog.text
    with pytest.raises(EngineGone):
        thread.call(PlanPrompt(request("x"))).result(TIMEOUT)


# -- commands ------------------------------------------------------------------------------------------------------


def test_commands_are_answered_between_steps(thread: EngineThread, listener: Listener) -> None:
    thread.submit(request("a", 40))
    listener.wait(1)
    drop = ChangeCache(Operation.DROP, CacheTarget(prompt=request("a", 40).prompt_token_ids, blocks=(1,)))
    effect = thread.call(drop).result(TIMEOUT)
    assert effect.blocks == 1  # type: ignore[attr-defined]
    plan = thread.call(PlanPrompt(request("x", 40))).result(TIMEOUT)
    assert plan.computed == ((16, 32), (39, 40))  # type: ignore[attr-defined]


def test_a_command_that_makes_no_sense_is_refused(thread: EngineThread) -> None:
    with pytest.raises(CommandRefused, match="not a block hash"):
        thread.call(ChangeCache(Operation.DROP, CacheTarget(block_hash="xyz"))).result(TIMEOUT)
    assert thread.alive


def test_an_answer_nobody_waits_for_any_more(thread: EngineThread, listener: Listener) -> None:
    thread.submit(request("a", 20, 50))
    answer = thread.call(PlanPrompt(request("x")))
    answer.cancel()
    thread.submit(request("b"))
    assert len(listener.wait(2)) == 2 and thread.alive


def test_what_a_step_said_is_held_until_the_next_one_is_ready_for_its_network(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers would take the interpreter from the engine in between. A first token is not held."""
    events: list[str] = []
    ended = threading.Event()

    def deliver(step: StepOutput) -> None:
        events.extend(f"told {output.num_generated}" for output in step.outputs)
        if any(output.finish_reason is not None for output in step.outputs):
            ended.set()

    def log(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), original(*args))[1])

    log(Scheduler, "schedule", "schedule")
    log(Runner, "run", "network")
    thread = EngineThread(config(checkpoint, backend="torch"), deliver, progress=False)
    thread.start()
    try:
        thread.submit(request("a", max_tokens=4))
        assert ended.wait(TIMEOUT)
    finally:
        thread.stop()
    step = ["schedule", "network"]
    assert events == [
        *step,
        "told 1",
        *step,
        "schedule",
        "told 2",
        "network",
        "schedule",
        "told 3",
        "network",
        "told 4",
    ]


def test_what_is_held_comes_before_an_abort(thread: EngineThread, listener: Listener) -> None:
    """A request's end is its last output, and no token that was made is lost."""
    thread.submit(request("a", max_tokens=400))
    listener.wait_for_token()
    thread.abort("a")
    listener.wait(1)
    outputs = [output for step in listener.steps for output in step.outputs]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert outputs[-1].num_generated == sum(len(output.token_ids) for output in outputs)
