"""The stopwatch finds what it wraps, and its parts add up to the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stopwatch import NETWORK, PARTS, watch
from scheduler.commands import SetVocabulary
from scheduler.engine import Engine
from scheduler.messages import GenerationRequest, Grammar, GrammarKind, SamplingParams
from tests.model.tiny import save_tiny
from tests.recovery.harness import Watched, make_engine
from tests.server.real import save_chat_model
from tests.server.tiny_tokenizers import byte_level, vocabulary

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


def test_a_guided_request_has_masks(tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    with watch() as stopwatch:
        engine = make_engine(tmp_path)
        engine.command(SetVocabulary(vocabulary(byte_level())))
        params = SamplingParams(max_tokens=4, seed=0)
        engine.add(GenerationRequest("r", (5, 6), params, grammar=Grammar(GrammarKind.REGEX, "[a-z]{9}")))
        while engine.has_work:
            engine.step()
        engine.guides.close()
    assert [record["kind"] for record in stopwatch.records] == ["guided"] * 3
    assert all(record["wall"]["masks"] > 0 for record in stopwatch.records)


def test_a_stand_in_takes_its_time(checkpoint: Path) -> None:
    with watch(stand_in=0.005) as stopwatch:
        world = Watched(make_engine(checkpoint))
        world.submit(PROMPT, 4, temperature=0.7, top_p=0.9)
        world.run()
    assert [record["kind"] for record in stopwatch.records] == ["top_p"] * 3
    for record in stopwatch.records:
        assert record["wall"]["elementwise"] >= 0.005 and record["wall"]["linear"] == 0.0
