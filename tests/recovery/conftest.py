from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.source import resolve
from scheduler.engine import Engine
from tests.model.cpu import native
from tests.model.tiny import save_tiny

LLAMAS = {"torch": "llama3", "c": "wide llama3"}


@pytest.fixture(scope="session", params=LLAMAS)
def backend(request: pytest.FixtureRequest) -> str:
    """What computes: the torch network, or the C backend where this processor has it."""
    if request.param == "c":
        native("f32"), native("bf16")  # skips
    return str(request.param)


@pytest.fixture(scope="session")
def architecture(backend: str) -> str:
    """A tiny random Llama 3 that the backend computes: grouped queries, scaled rotary angles, three layers."""
    return LLAMAS[backend]


@pytest.fixture(scope="session")
def checkpoint(backend: str, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(backend)
    save_tiny(architecture, path)
    return path


@pytest.fixture(autouse=True)
def no_other_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is run for each backend, every engine on its checkpoint is computed by that one."""
    if "backend" not in request.fixturenames:
        return
    expected = request.getfixturevalue("backend")
    init = Engine.__init__

    def checked(engine: Engine, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        assert engine.info.backend == expected

    monkeypatch.setattr(Engine, "__init__", checked)


@pytest.fixture(scope="session")
def default_model() -> str:
    """The default model's file, from the package that ships it."""
    return str(resolve(None).path)
