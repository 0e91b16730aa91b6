"""P10 on the default model and the C backend: random schedules, and every new token's logits are the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from model.inputs import StepInputs
from tests.recovery.harness import Watched, make_engine

BACKEND = "c"


class Recorder:
    """Logits of every sampled row of a run, by the tokens that they follow."""

    def __init__(self, world: Watched) -> None:
        self.by_context: dict[tuple[int, ...], bytes] = {}
        self._world = world
        self._run = world.engine.runner.run
        world.engine.runner.run = self._record  # type: ignore[method-assign]

    def _record(self, inputs: StepInputs) -> torch.Tensor:
        logits = self._run(inputs)
        contexts = self._contexts(inputs)
        for row, values in zip(inputs.logit_rows.tolist(), logits, strict=True):
            self.by_context[contexts[row]] = values.numpy().tobytes()
        return logits

    def _contexts(self, inputs: StepInputs) -> list[tuple[int, ...]]:
        """Of each row, its request's tokens up to it. Requests that share all blocks so far have the same tokens."""
        running = self._world.engine.scheduler.running
        rows: list[tuple[int, ...]] = []
        for table, q_len, kv_len in zip(inputs.block_tables.tolist(), inputs.q_len, inputs.kv_len, strict=True):
            blocks = table[: -(-kv_len // 16)]
            tokens = next(each.tokens for each in running if list(each.table.ids[: len(blocks)]) == blocks)
            rows += [tuple(tokens[:end]) for end in range(kv_len - q_len + 1, kv_len + 1)]
        return rows


def make_world(path: str, dtype: str, **options: object) -> tuple[Watched, Recorder]:
    world = Watched(make_engine(Path(path), dtype=dtype, **options))  # type: ignore[arg-type]
    assert world.engine.info.backend == BACKEND
    return world, Recorder(world)


def check(path: str, dtype: str, seed: int, count: int, longest: int, new: int) -> None:
    """The same requests one by one in peace, then all together with random budgets, arrivals, losses and preemptions
    in a pool that is too small for them."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000, 40000), k=rng.randint(1, longest)) for _ in range(count)]
    prompts += [prompts[0][: rng.randint(1, len(prompts[0]))] + rng.choices(range(1000, 40000), k=20)]
    calm, undisturbed = make_world(path, dtype, num_blocks=200, weights="bfloat16")
    for prompt in prompts:
        calm.complete(prompt, new)
    held = sorted(-(-(len(prompt) + new) // 16) for prompt in prompts)
    world, disturbed = make_world(path, dtype, num_blocks=held[-1] + 2, budget=rng.choice((17, 40, 100)), threads=2)
    waiting = [*prompts, *rng.sample(prompts, 2)]  # some come twice
    while waiting or world.engine.has_work:
        if waiting and rng.random() < 0.7:
            world.submit(waiting.pop(0), new, priority=rng.randint(0, 2))
        if len(world.engine.tree) and rng.random() < 0.3:
            nodes = sorted(world.engine.tree, key=lambda node: node.hash)
            world.engine.scheduler.drop(rng.choice(nodes))
        if world.engine.scheduler.running and rng.random() < 0.1:
            world.engine.scheduler._preempt(rng.choice(world.engine.scheduler.running), 0.0)
        world.step()
        world.engine.scheduler.check_integrity()
    assert world.engine.stats().preemptions > 0 and world.engine.stats().recomputed_tokens > 0
    assert disturbed.by_context.keys() == undisturbed.by_context.keys()
    differing = [
        len(context) for context, bits in disturbed.by_context.items() if bits != undisturbed.by_context[context]
    ]
    assert not differing


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_random_schedule_changes_no_bit(default_model: str, dtype: str) -> None:
    check(default_model, dtype, seed=1, count=3, longest=60, new=18)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_schedules_change_no_bit(default_model: str, dtype: str, seed: int) -> None:
    check(default_model, dtype, seed, count=7, longest=400, new=24)


def test_all_forms_of_weights_give_the_same_bytes(default_model: str) -> None:
    """Unpacked, or as the file has them. (Above, `auto` is compared to unpacked ones.)"""
    prompt = random.Random(1).choices(range(1000, 40000), k=60)
    recorded = []
    for weights in ("bfloat16", "quantized"):
        world, recorder = make_world(default_model, "bfloat16", num_blocks=20, weights=weights)
        world.complete(prompt, 4)
        recorded.append(recorder.by_context)
    assert len(recorded[0]) == 4
    assert recorded[0] == recorded[1]
