"""A server with a real engine on a tiny network, for real clients to talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.real import RealServer, save_chat_model, serve_real


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path, max_model_len=2048)
    with serve_real(path) as running:
        yield running
