"""Adapters in a real engine: one root of the cache per version, mixed steps, reloads under requests in flight."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.adapters import Adapters
from scheduler.commands import (
    AdapterInfo,
    CacheEffect,
    CacheTarget,
    ChangeCache,
    CommandRefused,
    ListAdapters,
    LoadAdapter,
    Operation,
    PlanPrompt,
    UnloadAdapter,
)
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import CacheReport, FinishReason, GenerationRequest, SamplingParams
from tests.model.adapters import save_adapter
from tests.model.tiny import save_tiny
from tests.recovery.harness import Ranges, Watched, as_ranges

PROMPT = random.Random(1).choices(range(3, 160), k=128)
WHOLE = [(0, 128)]
NEW = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 3 in `base`, and adapters of it in `x`, `y` and `other`."""
    path = tmp_path_factory.mktemp("adapters")
    save_tiny("llama3", path / "base")
    save_adapter("llama3", path / "x", seed=1)
    save_adapter("llama3", path / "y", seed=2, r=3, use_rslora=True, target_modules=["v_proj", "down_proj"])
    save_adapter("llama3", path / "other", seed=3)
    return path


def start(directory: Path, *names: str, **config: object) -> Watched:
    """A fresh engine that has loaded the adapters of these names."""
    values: dict[str, object] = {"num_blocks": 128, "device": "cpu", "threads": 1, "dtype": "float32"} | config
    adapters = tuple((name, str(directory / name)) for name in names)
    base = EngineConfig(model=str(directory / "base"), adapters=adapters)
    return Watched(Engine(replace(base, **values)))  # type: ignore[arg-type]


def load(world: Watched, name: str, path: Path) -> AdapterInfo:
    info = world.engine.command(LoadAdapter(name, str(path)))
    assert isinstance(info, AdapterInfo)
    return info


def ask(world: Watched, adapter: str | None, *, salt: str | None = None) -> tuple[Ranges, list[int]]:
    """The positions that PROMPT computes, and what comes of it."""
    world.steps.clear()
    name = world.submit(PROMPT, NEW, adapter=adapter, salt=salt)
    world.run()
    prompt = as_ranges(position for step in world.steps for position in step if position < len(PROMPT))
    return prompt, world.tokens(name)


def fresh(directory: Path, adapter: str | None, path: str | None = None, prompt: list[int] = PROMPT) -> list[int]:
    """What a new engine says that has served nobody else."""
    world = start(directory)
    if adapter is not None:
        load(world, adapter, directory / (path or adapter))
    name = world.submit(prompt, NEW, adapter=adapter)
    world.run()
    return world.tokens(name)


# -- one root per version ---------------------------------------------------------------------------------------------


def test_nothing_is_shared_between_base_and_adapters(directory: Path) -> None:
    world = start(directory, "x", "y")
    said = []
    for adapter in (None, "x", "y"):
        computed, tokens = ask(world, adapter)
        assert computed == WHOLE
        assert tokens == fresh(directory, adapter)
        said.append(tokens)
    assert said[0] != said[1] != said[2] != said[0]
    for adapter, tokens in zip((None, "x", "y"), said, strict=True):
        assert ask(world, adapter) == ([(127, 128)], tokens)


def test_a_salt_is_not_an_adapter_of_the_same_name(directory: Path) -> None:
    world = start(directory, "x")
    assert ask(world, "x")[0] == WHOLE
    assert ask(world, None, salt="x")[0] == WHOLE
    assert ask(world, "x", salt="x")[0] == WHOLE
    assert ask(world, None)[0] == WHOLE


def test_other_weights_under_an_old_name_start_anew(directory: Path) -> None:
    world = start(directory, "x")
    assert ask(world, "x") == (WHOLE, fresh(directory, "x"))
    before = world.engine.command(ListAdapters())
    after = load(world, "x", directory / "other")
    assert before != (after,) == world.engine.command(ListAdapters())
    assert ask(world, "x") == (WHOLE, fresh(directory, "x", "other"))
    load(world, "x", directory / "x")  # the first ones again: what is cached under them is still true
    assert ask(world, "x") == ([(127, 128)], fresh(directory, "x"))


def test_the_same_weights_under_another_name_or_from_elsewhere_are_the_same(directory: Path, tmp_path: Path) -> None:
    world = start(directory, "x")
    _, tokens = ask(world, "x")
    save_adapter("llama3", tmp_path, seed=1)
    assert load(world, "z", tmp_path).version == load(world, "x", tmp_path).version
    assert ask(world, "z") == ask(world, "x") == ([(127, 128)], tokens)
    effect = world.engine.command(ChangeCache(Operation.DROP, CacheTarget(everything=True)))
    assert isinstance(effect, CacheEffect)
    assert effect.blocks == world.engine.pool.evictions + 9  # eight of the prompt and what was generated, once


def test_the_reason_names_the_other_adapter_or_version(directory: Path) -> None:
    world = start(directory, "x", "y")
    ask(world, "x")

    def reason(adapter: str | None) -> str | None:
        params = SamplingParams(max_tokens=1, seed=0)
        plan = world.engine.command(PlanPrompt(GenerationRequest("", tuple(PROMPT), params, adapter=adapter)))
        assert isinstance(plan, CacheReport)
        return plan.blocks[0].reason

    assert reason("y") == reason(None) == "other_adapter"
    load(world, "x", directory / "other")
    assert reason("x") == "other_model_version"


def test_dropping_by_adapter_takes_all_its_versions_and_nothing_else(directory: Path) -> None:
    world = start(directory, "x", "y")
    for adapter in (None, "x", "y"):
        ask(world, adapter)
    load(world, "x", directory / "other")
    ask(world, "x")
    effect = world.engine.command(ChangeCache(Operation.DROP, CacheTarget(adapter="x")))
    assert isinstance(effect, CacheEffect) and effect.blocks == 2 * 9
    assert ask(world, "x")[0] == WHOLE
    load(world, "x", directory / "x")
    assert ask(world, "x")[0] == WHOLE
    assert ask(world, "y")[0] == ask(world, None)[0] == [(127, 128)]


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [7, 40, 512])
def test_mixed_steps_equal_fresh_engines(directory: Path, dtype: str, budget: int) -> None:
    """The same prompts at once under base, X and Y, arriving in any order."""
    rng = random.Random(budget)
    prompts = [PROMPT[: rng.randrange(20, 128)] + rng.choices(range(3, 160), k=5) for _ in range(3)]
    asked = [(prompt, adapter) for prompt in prompts for adapter in (None, "x", "y")]
    rng.shuffle(asked)
    world = start(directory, "x", "y", dtype=dtype, max_num_batched_tokens=budget)
    names = []
    for prompt, adapter in asked:
        names.append(world.submit(prompt, NEW, adapter=adapter))
        if rng.random() < 0.5:
            world.step()
    world.run()
    alone = start(directory, "x", "y", dtype=dtype)
    for (prompt, adapter), name in zip(asked, names, strict=True):
        alone.engine.command(ChangeCache(Operation.INVALIDATE, CacheTarget(everything=True)))
        expected = alone.submit(prompt, NEW, adapter=adapter)
        alone.run()
        assert world.tokens(name) == alone.tokens(expected)


# -- in flight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_request_in_flight_ends_on_the_version_it_began_with(directory: Path, steps: int) -> None:
    """Waiting, just prefilled or decoding; beside one that asks for the new version."""
    world = start(directory, "x")
    old = world.submit(PROMPT, NEW, adapter="x")
    for _ in range(steps):
        world.step()
    load(world, "x", directory / "other")
    new = world.submit(PROMPT, NEW, adapter="x")
    world.run()
    assert world.tokens(old) == fresh(directory, "x")
    assert world.tokens(new) == fresh(directory, "x", "other")
    usage = world.outputs[new][0].usage
    assert usage is not None and usage.cached_tokens == 0


def test_what_it_lost_is_recomputed_with_the_old_version(directory: Path) -> None:
    world = start(directory, "x")
    old = world.submit(PROMPT, NEW, adapter="x")
    for _ in range(4):
        world.step()
    load(world, "x", directory / "other")
    world.engine.command(ChangeCache(Operation.DROP, CacheTarget(adapter="x")))
    world.steps.clear()
    world.run()
    assert len(world.steps[0]) > 100
    assert world.tokens(old) == fresh(directory, "x")


def test_preempted_and_resumed_with_the_old_version(directory: Path) -> None:
    other = random.Random(2).choices(range(3, 160), k=100)
    world = start(directory, "x", num_blocks=14, max_model_len=200)
    older = world.submit(other, 60)
    newer = world.submit(PROMPT[:90], NEW, adapter="x")
    world.step()
    load(world, "x", directory / "other")
    world.run()
    assert world.engine.stats().preemptions > 0
    assert world.tokens(newer) == fresh(directory, "x", prompt=PROMPT[:90])
    assert len(world.tokens(older)) == 60


def test_unloaded_while_in_flight(directory: Path) -> None:
    world = start(directory, "x")
    old = world.submit(PROMPT, NEW, adapter="x")
    world.step()
    info = world.engine.command(UnloadAdapter("x"))
    assert isinstance(info, AdapterInfo) and info.name == "x"
    assert world.engine.command(ListAdapters()) == ()
    world.run()
    assert world.tokens(old) == fresh(directory, "x")
    refused = world.engine.add(GenerationRequest("late", tuple(PROMPT), SamplingParams(1, 0), adapter="x"))
    assert refused is not None and refused.finish_reason is FinishReason.ERROR
    assert refused.error == "there is no adapter 'x'"


# -- commands ---------------------------------------------------------------------------------------------------------


def test_listed_in_the_order_of_their_names_first_load(directory: Path) -> None:
    world = start(directory, "y", "x")
    load(world, "y", directory / "other")
    listed = world.engine.command(ListAdapters())
    assert isinstance(listed, tuple)
    assert [(info.name, info.path, info.rank) for info in listed] == [
        ("y", str(directory / "other"), 4),
        ("x", str(directory / "x"), 4),
    ]
    assert all(len(bytes.fromhex(info.version)) == 32 for info in listed)


def test_refused_commands_name_what_is_wrong_and_change_nothing(directory: Path) -> None:
    world = start(directory, "x")
    before = world.engine.command(ListAdapters())
    for command, param, said in (
        (LoadAdapter("x", str(directory / "nowhere")), "lora_path", "no directory"),
        (LoadAdapter("x", str(directory / "base")), "lora_path", "adapter_config.json cannot be read"),
        (LoadAdapter("", str(directory / "x")), "lora_name", "needs a name"),
        (UnloadAdapter("y"), "lora_name", "there is no adapter 'y'"),
        (ChangeCache(Operation.DROP, CacheTarget(prompt=(1, 2), adapter="y")), "adapter", "there is no adapter 'y'"),
    ):
        with pytest.raises(CommandRefused, match=said) as refused:
            world.engine.command(command)
        assert refused.value.param == param
    assert world.engine.command(ListAdapters()) == before


class Dictated:
    """Weights that are nothing but their digest."""

    rank = 1

    def __init__(self, path: str) -> None:
        self.digest = path.encode()


def test_equal_content_is_one_object() -> None:
    adapters = Adapters(Dictated)
    first = adapters.load("a", "p").weights
    assert adapters.load("a", "p").weights is first
    assert adapters.load("b", "p").weights is first
    assert adapters.load("a", "q").weights is not first
    assert adapters.load("a", "p").weights is first
    adapters.unload("a"), adapters.unload("b")
    assert list(adapters) == []
    assert adapters.load("a", "p").weights is not first
