"""What every route needs, in one place: the engine, the tokenizer, the metrics, the settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from scheduler.messages import EngineInfo
from server.async_engine import AsyncEngine
from server.errors import UnknownModel
from server.metrics import EngineMetrics
from server.prompt import PromptEncoder
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_name: str  # as clients spell it
    max_body_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerState:
    engine: AsyncEngine
    info: EngineInfo
    tokenizer: Tokenizer
    encoder: PromptEncoder
    metrics: EngineMetrics
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is."""
        if name is not None and name != self.settings.model_name:
            raise UnknownModel(name)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
