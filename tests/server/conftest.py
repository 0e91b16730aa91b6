from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.server.real import save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama 3 with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat") / "tiny"
    save_chat_model(path)
    return path


@pytest.fixture(scope="session")
def roomy_model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for long texts."""
    path = tmp_path_factory.mktemp("roomy") / "tiny"
    shutil.copytree(chat_model, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}), encoding="utf-8")
    return path
