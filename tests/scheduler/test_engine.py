"""A real engine on a tiny checkpoint: refusals, failures, seeds, stops, counters."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.inputs import StepInputs
from scheduler.messages import EngineStats, FinishReason, GenerationRequest, RequestOutput, SamplingParams
from tests.model.tiny import VOCAB_SIZE
from tests.recovery.harness import Watched, make_engine

rng = random.Random(3)
PROMPT = rng.choices(range(3, VOCAB_SIZE), k=50)
OTHER = rng.choices(range(3, VOCAB_SIZE), k=40)


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Watched:
    """An engine to ask what the right answer is."""
    return Watched(make_engine(checkpoint, num_blocks=400))


def sampled(world: Watched) -> list[torch.Tensor]:
    return [logits for logits in world.logits if logits.shape[0]]


def spoil(world: Watched, how: Callable[[StepInputs, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Change what the network gives, until the returned function is called."""
    whole = world.engine.runner.run

    def run(inputs: StepInputs) -> torch.Tensor:
        return how(inputs, whole(inputs).clone())

    def mend() -> None:
        world.engine.runner.run = whole  # type: ignore[method-assign]

    world.engine.runner.run = run  # type: ignore[method-assign]
    return mend


def broken(inputs: StepInputs, logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the network broke")


def not_finite(world: Watched, row: int) -> Callable[[StepInputs, torch.Tensor], torch.Tensor]:
    """The `row`-th span of a step comes out as NaN, in K/V and logits."""

    def how(inputs: StepInputs, logits: torch.Tensor) -> torch.Tensor:
        start = sum(inputs.q_len[:row])
        slots = inputs.slots[start : start + inputs.q_len[row]]
        size = world.engine.info.block_size
        for planes in world.engine.runner._planes:
            for plane in planes:
                plane.permute(0, 2, 1, 3)[slots // size, slots % size] = torch.nan
        logits[row] = torch.nan
        return logits

    return how


def storage_is_finite(world: Watched) -> bool:
    planes = [plane for layer in world.engine.runner._planes for plane in layer]
    return all(bool(plane.isfinite().all()) for plane in planes)


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_fails_its_own_requests_only(world: Watched, reference: Watched) -> None:
    mend = spoil(world, broken)
    failing = [world.submit(PROMPT, 3), world.submit(OTHER, 3)]
    world.step()
    mend()
    for name in failing:
        (output,) = world.outputs[name]
        assert output.finish_reason is FinishReason.ERROR and output.error == "RuntimeError: the network broke"
    stats = world.engine.stats()
    assert (stats.failed_steps, stats.blocks_in_use, stats.running) == (1, 0, 0)
    assert world.complete(PROMPT, 8) == reference.complete(PROMPT, 8)
    assert all(torch.equal(a, b) for a, b in zip(sampled(world), sampled(reference), strict=True))
    assert world.steps[0] == list(range(50)), "nothing of the failed step was reused"


def test_a_request_beyond_the_failed_step_goes_on(checkpoint: Path, reference: Watched) -> None:
    world = Watched(make_engine(checkpoint, budget=50))
    failing = world.submit(PROMPT, 3)
    waiting = world.submit(OTHER, 3)
    mend = spoil(world, broken)
    world.step()
    mend()
    world.run()
    assert world.outputs[failing][-1].finish_reason is FinishReason.ERROR
    assert world.tokens(waiting) == reference.complete(OTHER, 3)


def test_a_failed_step_leaves_zeros(world: Watched) -> None:
    """What it wrote before it raised is gone before anyone else gets the blocks."""
    poison = not_finite(world, 0)

    def how(inputs: StepInputs, logits: torch.Tensor) -> torch.Tensor:
        poison(inputs, logits)
        raise RuntimeError("the network broke half-way")

    mend = spoil(world, how)
    world.submit(PROMPT, 3)
    world.step()
    mend()
    assert storage_is_finite(world)
    assert all(not plane.any() for layer in world.engine.runner._planes for plane in layer)


def test_logits_that_are_not_finite_fail_their_request_only(world: Watched, reference: Watched) -> None:
    bad, good = world.submit(PROMPT, 6), world.submit(OTHER, 6)
    world.step()
    mend = spoil(world, not_finite(world, 0))
    world.step()
    mend()
    last = world.outputs[bad][-1]
    assert last.finish_reason is FinishReason.ERROR and "not finite" in str(last.error)
    assert storage_is_finite(world)
    world.run()
    assert world.tokens(good) == reference.complete(OTHER, 6)
    assert world.complete(PROMPT, 6) == reference.complete(PROMPT, 6)
    assert world.steps[0] == list(range(50)), "nothing that the failed request computed was reused"


def test_a_sampler_that_raises_is_a_failed_step(world: Watched, reference: Watched) -> None:
    mend = spoil(world, lambda inputs, logits: logits[:, :-1])  # a row too narrow for the vocabulary
    name = world.submit(PROMPT, 3)
    world.step()
    mend()
    assert str(world.outputs[name][-1].error).startswith("ValueError: ")
    assert world.complete(PROMPT, 3) == reference.complete(PROMPT, 3)


# -- refusals ------------------------------------------------------------------------------------------------------


def refusal(world: Watched, prompt: list[int], max_tokens: int = 1, **request: object) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    output = world.engine.add(GenerationRequest("r", tuple(prompt), params, **request))  # type: ignore[arg-type]
    assert output is not None and output.request_id == "r" and output.finish_reason is FinishReason.ERROR
    return output


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([5, VOCAB_SIZE], 1, f"prompt token 1 is {VOCAB_SIZE}, outside the vocabulary"),
        ([-1], 1, "prompt token 0 is -1, outside the vocabulary"),
        ([5], 0, "max_tokens must be at least 1, not 0"),
        ([5] * 500, 13, "500 prompt tokens and max_tokens 13 exceed the maximum of 512 tokens a request"),
    ],
)
def test_what_could_never_run_is_refused_at_once(
    reference: Watched, prompt: list[int], max_tokens: int, message: str
) -> None:
    assert refusal(reference, prompt, max_tokens).error == message
    assert not reference.engine.has_work


@pytest.mark.parametrize(
    "named",
    [
        {"stop_token_ids": (VOCAB_SIZE,)},
        {"logit_bias": ((VOCAB_SIZE, 1.0),)},
        {"allowed_token_ids": (0, -1)},
        {"bad_words": ((1, VOCAB_SIZE),)},
    ],
)
def test_a_field_that_names_no_token_would_fail_the_whole_step_so_it_is_refused(
    reference: Watched, named: dict[str, object]
) -> None:
    params = SamplingParams(max_tokens=1, seed=0, **named)  # type: ignore[arg-type]
    output = reference.engine.add(GenerationRequest("r", (5,), params))
    assert output is not None and output.finish_reason is FinishReason.ERROR
    assert "outside the vocabulary" in str(output.error) and next(iter(named)) in str(output.error)
    assert not reference.engine.has_work


def test_what_bans_biases_and_bad_words_say_is_done(reference: Watched) -> None:
    def first_two(**sampling: object) -> list[int]:
        name = reference.submit(PROMPT, 2, **sampling)  # type: ignore[arg-type]
        reference.run()
        return reference.tokens(name)

    first, second = first_two()
    others = tuple(set(range(VOCAB_SIZE)) - {first})
    assert first_two(logit_bias=((first, -100.0),))[0] != first
    assert first_two(allowed_token_ids=others)[0] != first
    assert first_two(bad_words=((first,),))[0] != first
    again = first_two(bad_words=((first, second),))
    assert again[0] == first and again[1] != second


def test_an_adapter_nobody_loaded_is_refused(reference: Watched) -> None:
    assert "adapter" in str(refusal(reference, [5], adapter="unknown").error)
    assert not reference.engine.has_work


def test_a_prompt_longer_than_the_cache_is_refused_and_the_longest_runs(checkpoint: Path) -> None:
    world = Watched(make_engine(checkpoint, num_blocks=3))
    assert world.engine.info.max_model_len == 48
    assert "47 prompt tokens and max_tokens 2 exceed" in str(refusal(world, PROMPT[:47], 2).error)
    assert len(world.complete(PROMPT[:40], 8)) == 8


# -- counters ------------------------------------------------------------------------------------------------------


def balanced(stats: EngineStats) -> bool:
    found = stats.prompt_tokens_reused + stats.prompt_tokens_copied + stats.prompt_tokens_pending
    return stats.prompt_tokens == found + stats.prompt_tokens_computed


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_computed_and_found_add_up_to_the_prompts(checkpoint: Path, num_blocks: int) -> None:
    """After every step, with sharing, copies, pending blocks and, in the small pool, preemptions."""
    world = Watched(make_engine(checkpoint, num_blocks=num_blocks, budget=64, max_model_len=120))
    prompts = [PROMPT, PROMPT[:45] + OTHER[:7], PROMPT[:33], OTHER, PROMPT, PROMPT[:32]]
    names = [world.submit(prompt, 20) for prompt in prompts]
    computed = 0
    for _ in range(500):
        if not world.engine.has_work:
            break
        world.step()
        stats = world.engine.stats()
        assert balanced(stats)
        assert stats.step_tokens == len(world.steps[-1])
        computed += stats.step_tokens
    stats = world.engine.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.prompt_tokens_pending > 0 and stats.prompt_tokens_reused + stats.prompt_tokens_copied > 0
    assert stats.generation_tokens == 20 * len(names)
    assert (stats.preemptions > 0) is (num_blocks == 14)
    decoded = stats.generation_tokens - len(names)  # the first token of each comes with the prompt's last position
    assert computed == stats.prompt_tokens_computed + decoded + stats.recomputed_tokens
    for name, prompt in zip(names, prompts, strict=True):
        usage = next(output.usage for output in world.outputs[name] if output.usage is not None)
        assert usage.prompt_tokens == len(prompt) == usage.cached_tokens + usage.computed


def test_gauges(world: Watched) -> None:
    name = world.submit(PROMPT, 3)
    stats = world.engine.stats()
    assert (stats.waiting, stats.running, stats.blocks_total) == (1, 0, 64)
    world.step()
    stats = world.engine.stats()
    assert (stats.waiting, stats.running, stats.blocks_in_use, stats.blocks_cached) == (0, 1, 4, 0)
    world.run()
    stats = world.engine.stats()
    assert (stats.running, stats.blocks_in_use, stats.blocks_cached, stats.published_blocks) == (0, 0, 4, 3)
    assert len(world.tokens(name)) == 3


def test_an_idle_step_does_nothing(world: Watched) -> None:
    assert world.engine.step().outputs == () and world.steps == []


# -- ends ----------------------------------------------------------------------------------------------------------


def ended(world: Watched, prompt: list[int], max_tokens: int, **params: object) -> tuple[list[int], RequestOutput]:
    name = world.submit(prompt, max_tokens, **params)
    world.run()
    outputs = world.outputs[name]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    return [token for output in outputs for token in output.token_ids], outputs[-1]


def test_a_stop_token_ends_the_text_and_min_tokens_keeps_it_from_being_drawn(reference: Watched) -> None:
    tokens = reference.complete(PROMPT, 12)
    stop = tokens[2]
    cut, last = ended(reference, PROMPT, 12, stop_token_ids=(stop,))
    assert cut == tokens[: tokens.index(stop) + 1]
    assert last.finish_reason is FinishReason.STOP and last.stop_token_id == stop
    longer, _ = ended(reference, PROMPT, 12, stop_token_ids=(stop,), min_tokens=8)
    assert stop not in longer[:8] and len(longer) > 8


def test_end_of_sequence_ends_the_text_unless_it_is_ignored(reference: Watched) -> None:
    (eos,) = reference.engine.info.eos_token_ids

    def always_eos(inputs: StepInputs, logits: torch.Tensor) -> torch.Tensor:
        logits[:, eos] = 100.0
        return logits

    mend = spoil(reference, always_eos)
    try:
        tokens, last = ended(reference, PROMPT, 6, ignore_eos=False)
        assert tokens == [eos] and last.finish_reason is FinishReason.STOP and last.stop_token_id is None
        tokens, last = ended(reference, PROMPT, 6, ignore_eos=True)
        assert tokens == [eos] * 6 and last.finish_reason is FinishReason.LENGTH
        tokens, last = ended(reference, PROMPT, 6, ignore_eos=False, min_tokens=4)
        assert eos not in tokens[:4] and tokens[4:] == [eos] and last.finish_reason is FinishReason.STOP
    finally:
        mend()


def test_logprobs_come_with_each_token(reference: Watched) -> None:
    name = reference.submit(PROMPT, 3, logprobs=2)
    reference.run()
    for output in reference.outputs[name]:
        (entry,) = output.logprobs
        assert entry.token_id == output.token_ids[0] == entry.top[0][0] and entry.rank == 1 and len(entry.top) == 2
    name = reference.submit(PROMPT, 1)
    reference.run()
    assert reference.outputs[name][0].logprobs == ()


# -- seeds ---------------------------------------------------------------------------------------------------------

HOT = {"temperature": 1.2, "top_p": 0.95}


def test_a_seed_gives_its_text_alone_in_company_and_in_chunks(checkpoint: Path, reference: Watched) -> None:
    alone = ended(reference, PROMPT, 16, seed=11, **HOT)[0]
    assert ended(reference, PROMPT, 16, seed=11, **HOT)[0] == alone
    assert ended(reference, PROMPT, 16, seed=12, **HOT)[0] != alone
    assert ended(reference, PROMPT, 16, seed=11, choice=1, **HOT)[0] != alone
    world = Watched(make_engine(checkpoint, budget=9))
    names = [world.submit(PROMPT, 16, seed=seed, **HOT) for seed in (5, 11, 7)]
    world.submit(OTHER, 16, seed=11, **HOT)
    world.run()
    assert world.tokens(names[1]) == alone


def test_a_seed_gives_its_text_after_a_preemption(checkpoint: Path, reference: Watched) -> None:
    alone = ended(reference, PROMPT, 30, seed=11, **HOT)[0]
    world = Watched(make_engine(checkpoint, num_blocks=8, max_model_len=120))
    older, newer = world.submit(OTHER, 40, seed=3, **HOT), world.submit(PROMPT, 30, seed=11, **HOT)
    world.run()
    assert world.engine.stats().preemptions > 0
    assert world.tokens(newer) == alone
    assert world.tokens(older) == ended(reference, OTHER, 40, seed=3, **HOT)[0]


def test_aborting(world: Watched) -> None:
    name = world.submit(PROMPT, 30)
    world.step()
    output = world.engine.abort(name)
    assert output is not None and output.finish_reason is FinishReason.ABORT and output.num_generated == 1
    assert world.engine.abort(name) is None and world.engine.abort("unknown") is None
    assert not world.engine.has_work and world.engine.stats().blocks_in_use == 0
