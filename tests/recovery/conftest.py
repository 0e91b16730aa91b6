from __future__ import annotations

from pathlib import Path

import pytest

from model.source import resolve
from tests.model.tiny import save_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama 3: grouped queries, scaled rotary angles, three layers."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_tiny("llama3", path)
    return path


@pytest.fixture(scope="session")
def default_model() -> str:
    """The default model's file, from the package that ships it."""
    return str(resolve(None).path)
