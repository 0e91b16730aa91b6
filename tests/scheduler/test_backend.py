"""Which backend computes, and what is said where the C backend cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from model.cpu import choose
from model.cpu.library import Library, NotBuilt, find_library
from scheduler.backend import BackendUnavailable
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from server.serve import ServeError, engine_thread, start_engine
from tests.model.cpu import native
from tests.model.tiny import save_tiny


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    save_tiny("wide llama3", path)
    return path


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("narrow")
    save_tiny("llama3", path)
    return path


def engine(path: Path, **options: Any) -> Engine:
    values = {"dtype": "float32", "device": "cpu", "num_blocks": 8, "threads": 1} | options
    return Engine(EngineConfig(model=str(path), **values))


def test_the_c_backend_is_the_default(wide: Path) -> None:
    native("f32"), native("bf16")
    assert engine(wide).info.backend == "c"
    chosen = engine(wide, dtype="auto")
    assert (chosen.info.backend, chosen.info.dtype) == ("c", "bfloat16")
    assert engine(wide, backend="c").info.backend == "c"
    assert engine(wide, backend="torch").info.backend == "torch"


def test_backends_do_not_share_a_cache(wide: Path) -> None:
    native("f32")
    roots = {engine(wide, backend=backend).identity.root_hash() for backend in ("c", "torch")}
    assert len(roots) == 2


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, wide: Path, narrow: Path) -> tuple[Path, Any]:
    """A model and options with which the C backend cannot compute."""
    match request.param:
        case "not built":
            monkeypatch.setattr(choose, "find_library", _not_built)
        case "no AVX2":
            monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
        case "head size":
            return narrow, {}
        case "block size":
            return wide, {"block_size": 8}
        case "dtype":
            return wide, {"dtype": "float16"}
    return wide, {}


def _not_built(variant: str) -> Path:
    return find_library(variant, ())


CASES = pytest.mark.parametrize(
    "case, why",
    [
        ("not built", "it was not built, as no C compiler was found when pagekv was installed"),
        ("no AVX2", "this processor has no AVX2"),
        ("head size", "it has heads of 64, 96 or 128 dimensions, the model has 16"),
        ("block size", "it has blocks of 16, 32, 64 or 128 tokens, not 8"),
        ("dtype", "it computes in bfloat16 or float32, not in float16"),
    ],
    indirect=["case"],
    ids=["not built", "no AVX2", "head size", "block size", "dtype"],
)


@CASES
def test_torch_computes_and_one_line_says_why(
    case: tuple[Path, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, options = case
    with caplog.at_level(logging.INFO, "pagekv.engine"):
        assert engine(path, **options).info.backend == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        f"computing with torch, as the C backend cannot be used: {why}"
    ]


@CASES
def test_asked_for_by_name_it_is_refused(case: tuple[Path, Any], why: str) -> None:
    path, options = case
    with pytest.raises(BackendUnavailable, match=f"^The C backend cannot be used: {why}.$"):
        engine(path, backend="c", **options)
    config = EngineConfig(model=str(path), device="cpu", num_blocks=8, backend="c", **{"dtype": "float32"} | options)
    with pytest.raises(ServeError, match=why):
        start_engine(engine_thread(config), found=lambda path: None)


@CASES
def test_quantized_weights_without_it_are_refused(case: tuple[Path, Any], why: str) -> None:
    path, options = case
    with pytest.raises(BackendUnavailable, match=f"^Only the C backend computes with quantized weights, .*: {why}.$"):
        engine(path, weights="quantized", **options)


def test_quantized_weights_of_a_model_that_has_none(wide: Path) -> None:
    native("f32")
    with pytest.raises(BackendUnavailable, match="has no quantized matrices that the C backend can read"):
        engine(wide, weights="quantized")
    with pytest.raises(BackendUnavailable, match="it is not used: torch computes"):
        engine(wide, weights="quantized", backend="torch")


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    """One that does not load, and one whose structures are others."""
    (tmp_path / "_avx2_f32.so").write_bytes(b"no library")
    with pytest.raises(NotBuilt):
        Library(find_library("avx2_f32", (tmp_path,)))
