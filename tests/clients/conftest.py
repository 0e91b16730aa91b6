"""A server with a real engine on a tiny network, for real clients to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.real import RealServer, save_chat_model, serve_real


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The tiny network's directory, and the network as transformers has it."""
    path = tmp_path_factory.mktemp("model")
    return path, save_chat_model(path, max_model_len=2048).eval()


@pytest.fixture(scope="session")
def server(checkpoint: tuple[Path, Any]) -> Iterator[RealServer]:
    with serve_real(checkpoint[0]) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(checkpoint: tuple[Path, Any]) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint[0])
