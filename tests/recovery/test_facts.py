"""F1 to F9: the properties of causal decoders that recovery rests on, seen on real networks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(1).choices(range(3, 160), k=128)
EDITED = [*PROMPT[:39], 1 + PROMPT[39], *PROMPT[40:]]


def planes(world: Watched, name: str, layer: int) -> list[torch.Tensor]:
    """K and V of one layer in position order, [positions, kv_heads * head_dim] each, of a running request."""
    request = next(request for request in world.engine.scheduler.running if request.request_id == name)
    blocks = [block.block_id for block in request.table if block is not None]
    tensors = []
    for plane in (0, 1):
        found = torch.cat([world.engine._storage.slots(layer, plane, block) for block in blocks], dim=1)
        tensors.append(found.transpose(0, 1).flatten(1)[: len(request.tokens) - 1])
    return tensors


@pytest.fixture
def world(checkpoint: Path) -> Watched:
    return Watched(make_engine(checkpoint))


def start(world: Watched, prompt: list[int]) -> str:
    """Prefill a prompt and keep it running."""
    name = world.submit(prompt, 50)
    world.step()
    return name


def test_f1_nothing_at_p_or_later_touches_what_is_before(checkpoint: Path) -> None:
    old, new = Watched(make_engine(checkpoint)), Watched(make_engine(checkpoint))
    names = start(old, PROMPT), start(new, EDITED)
    for layer in range(3):
        for before, after in zip(planes(old, names[0], layer), planes(new, names[1], layer), strict=True):
            assert torch.equal(before[:39], after[:39])


def test_f2_position_p_is_computed_and_the_later_ones_depend_on_it(world: Watched) -> None:
    world.complete(PROMPT)
    world.complete(EDITED)
    assert 39 in world.steps[0]
    right = world.logits[-1]
    # Had p been skipped, its slot would hold something else; zeroed, it changes what the later positions say.
    world.engine._storage.zero(world.node(EDITED, 2).block.block_id, 7)  # type: ignore[union-attr]
    world.complete(EDITED)
    assert not torch.equal(world.logits[-1], right)


def test_f3_a_lost_block_does_not_make_later_ones_wrong(world: Watched, checkpoint: Path) -> None:
    world.complete(PROMPT)
    kept = {index: world.node(PROMPT, index).block for index in range(3, 8)}
    checksums = {index: world.engine._storage.checksum(block.block_id) for index, block in kept.items()}  # type: ignore[union-attr]
    world.drop(PROMPT, 2)
    cold = Watched(make_engine(checkpoint))
    cold.complete(PROMPT)
    for index, checksum in checksums.items():
        block = cold.node(PROMPT, index).block
        assert block is not None
        assert cold.engine._storage.checksum(block.block_id) == checksum


def test_f4_a_changed_token_spoils_what_follows_and_both_versions_live_on(world: Watched) -> None:
    world.complete(PROMPT)
    world.complete(EDITED)
    assert world.steps == [list(range(39, 128))]
    for prompt in (PROMPT, EDITED):
        assert world.computed(prompt) == [(127, 128)]
    assert world.node(PROMPT, 5) is not world.node(EDITED, 5)


def test_f5_by_layer_the_spread_is_uneven(default_model: str) -> None:
    """On the default model's tensors: after an edit at 39, the first layer's K/V of later positions are equal, the
    second layer's differ."""
    prompt = random.Random(5).choices(range(1000, 40000), k=64)
    edited = [*prompt[:39], 1 + prompt[39], *prompt[40:]]
    old, new = (Watched(make_engine(Path(default_model), max_model_len=256)) for _ in range(2))
    names = start(old, prompt), start(new, edited)
    for first, second in zip(planes(old, names[0], 0), planes(new, names[1], 0), strict=True):
        assert torch.equal(first[40:], second[40:])
        assert not torch.equal(first[39], second[39])
    for first, second in zip(planes(old, names[0], 1), planes(new, names[1], 1), strict=True):
        assert torch.equal(first[:39], second[:39])
        assert all(not torch.equal(first[p], second[p]) for p in range(39, 64))


def test_f6_sampled_text_after_an_edit_is_not_served_as_new(world: Watched, checkpoint: Path) -> None:
    said = world.complete(PROMPT, 20)
    fresh = Watched(make_engine(checkpoint))
    expected = fresh.complete(EDITED, 20)
    assert world.complete(EDITED, 20) == expected
    # Re-sent as a prompt, the old text is input like any other: computed after the edited prefix, from 39 on.
    assert Watched(make_engine(checkpoint)).complete(EDITED + said) == world.complete(EDITED + said)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"block_size": 32}],
    ids=["compute and K/V dtype", "block size and layout"],
)
def test_f7_some_changes_void_everything(checkpoint: Path, change: dict[str, object]) -> None:
    one, other = make_engine(checkpoint), make_engine(checkpoint, **change)  # type: ignore[arg-type]
    assert one.identity.root_hash() != other.identity.root_hash()


def test_f8_same_tokens_after_a_different_prefix_are_other_blocks(world: Watched) -> None:
    shared = PROMPT[16:128]
    first, second = PROMPT[:16] + shared, PROMPT[64:80] + shared
    world.complete(first)
    assert world.computed(second)[-1] == (0, 128)
    for index in range(1, 7):
        one, other = world.node(first, index), world.node(second, index)
        assert one.tokens == other.tokens and one.hash != other.hash and one.block is not other.block


def test_f9_an_earlier_gap_means_an_earlier_start(world: Watched) -> None:
    world.complete(PROMPT)
    world.drop(PROMPT, 0, 2)
    assert world.computed(PROMPT)[0] == (0, 16)
