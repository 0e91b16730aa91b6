"""Sampling defaults: OpenAI's, the model's own in their place, and the operator's in place of both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.sampling_defaults import BadDefault, SamplingDefaults


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": True}, "do_sample"),
    ],
)
def test_what_no_request_could_have_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(BadDefault, match=f"^here: .*{named}"):
        SamplingDefaults.of(values, "here")


def defaults_of(model: Path, **options: Any) -> SamplingDefaults:
    return Engine(EngineConfig(model=str(model), num_blocks=8, **options)).info.sampling


def checkpoint_that_advises(checkpoint: Path, folder: Path, **values: Any) -> Path:
    copytree(checkpoint, folder)
    file = folder / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | values))
    return folder


ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingDefaults(0.6, 0.95, 20, 0.0, 1.1)),
        ({"generation_config": "none"}, SamplingDefaults()),
        ({"sampling_override": {"top_k": 5, "min_p": 0.1}}, SamplingDefaults(0.6, 0.95, 5, 0.1, 1.1)),
        ({"generation_config": "none", "sampling_override": {"top_k": 5}}, SamplingDefaults(top_k=5)),
    ],
)
def test_the_engine_tells_the_defaults(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], expected: SamplingDefaults
) -> None:
    model = checkpoint_that_advises(checkpoint, tmp_path / "m", **ADVICE)
    assert defaults_of(model, **options) == expected


def test_a_model_that_advises_nothing(checkpoint: Path) -> None:
    assert defaults_of(checkpoint) == SamplingDefaults()


def test_bad_advice_names_the_model_and_the_key(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoint_that_advises(checkpoint, tmp_path / "m", top_p=7)
    with pytest.raises(BadDefault, match=rf"{model}: top_p is 7"):
        defaults_of(model)
    assert defaults_of(model, generation_config="none") == SamplingDefaults()
