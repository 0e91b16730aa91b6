"""F7 and F8, and the table's rows on identities: another adapter, another salt, other weights under the old name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from scheduler.commands import LoadAdapter
from tests.model.adapters import save_adapter
from tests.model.tiny import save_tiny
from tests.recovery.harness import Watched, make_engine

PROMPT = random.Random(15).choices(range(3, 160), k=128)
ALL = list(range(128))


def computed(world: Watched, *, adapter: str | None = None, salt: str | None = None) -> list[int]:
    world.steps.clear()
    world.submit(PROMPT, 1, adapter=adapter, salt=salt)
    world.run()
    return [position for step in world.steps for position in step]


@pytest.fixture
def world(checkpoint: Path, architecture: str, tmp_path: Path) -> Watched:
    world = Watched(make_engine(checkpoint))
    for seed, name in enumerate("xy"):
        save_adapter(architecture, tmp_path / name, seed=seed)
        world.engine.command(LoadAdapter(name, str(tmp_path / name)))
    return world


def test_adapter_other(world: Watched) -> None:
    assert computed(world, adapter="x") == ALL
    assert computed(world, adapter="y") == ALL
    assert computed(world) == ALL
    for adapter in ("x", "y", None):
        assert computed(world, adapter=adapter) == [127]


def test_salt_other(world: Watched) -> None:
    assert computed(world, salt="a") == ALL
    assert computed(world, salt="b") == ALL


def test_a_salt_is_not_an_adapter_of_the_same_name(world: Watched) -> None:
    assert computed(world, adapter="x") == ALL
    assert computed(world, salt="x") == ALL
    assert computed(world, adapter="x", salt="x") == ALL


def test_adapter_reloaded_with_other_weights(world: Watched, architecture: str, tmp_path: Path) -> None:
    computed(world, adapter="x")
    save_adapter(architecture, tmp_path / "x", seed=9)
    world.engine.command(LoadAdapter("x", str(tmp_path / "x")))
    assert computed(world, adapter="x") == ALL


def test_weights_reloaded_under_the_same_name(architecture: str, tmp_path: Path) -> None:
    """Same directory, same name, same configuration: only the bytes of the weights differ."""
    path = tmp_path / "model"
    roots = []
    for seed in (0, 1):
        save_tiny(architecture, path, seed=seed)
        roots.append(make_engine(path).identity.root_hash())
    shutil.copytree(path, tmp_path / "elsewhere")
    assert roots[0] != roots[1]
    assert make_engine(tmp_path / "elsewhere").identity.root_hash() == roots[1], "a path is no part of an identity"
