"""The stopwatch finds what it wraps, and its parts add up to the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stopwatch import NETWORK, PARTS, watch
from scheduler.engine import Engine
from tests.model.tiny import save_tiny
from tests.recovery.harness import Watched, make_engine

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_tiny("llama3", path)
    return path


def test_each_step_of_decoding_is_split_into_its_parts(checkpoint: Path) -> None:
    before = Engine.step
    with watch() as stopwatch:
        world = Watched(make_engine(checkpoint))
        world.submit(PROMPT, 6)
        world.submit(PROMPT[5:], 6, temperature=1.0)
        world.run()
    assert Engine.step is before
    assert len(stopwatch.records) == 5, "a step that computes a prompt is no step of decoding"
    for record in stopwatch.records:
        assert record["requests"] == 2 and record["kind"] == "greedy"
        for clock in ("wall", "cpu"):
            assert set(record[clock]) == set(PARTS)
        assert all(record["wall"][part] > 0 for part in ("schedule", "inputs", "head", "sampler", "update", "idle"))
        assert sum(record["wall"][part] for part in NETWORK) > 0.2 * sum(record["wall"].values())


def test_a_stand_in_takes_its_time(checkpoint: Path) -> None:
    with watch(stand_in=0.005) as stopwatch:
        world = Watched(make_engine(checkpoint))
        world.submit(PROMPT, 4, temperature=0.7, top_p=0.9)
        world.run()
    assert [record["kind"] for record in stopwatch.records] == ["top_p"] * 3
    for record in stopwatch.records:
        assert record["wall"]["elementwise"] >= 0.005 and record["wall"]["linear"] == 0.0
