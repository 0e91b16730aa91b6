from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.tiny import save_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2: biases, tied embeddings."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_tiny("qwen2", path)
    return path
