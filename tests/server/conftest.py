from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.real import save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama 3 with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat") / "tiny"
    save_chat_model(path)
    return path
