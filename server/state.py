"""What every route needs, in one place: the engine, the tokenizer, the metrics, the settings."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from scheduler.messages import EngineInfo
from server.async_engine import AsyncEngine
from server.metrics import EngineMetrics
from server.prompt import PromptEncoder
from server.served import ServedModels
from server.structured.grammars import Grammars
from server.structured.tags import WrittenTags
from server.tokenizer import Tokenizer
from server.tools import DEFAULT_FORMAT
from server.tools.calls import ToolFormat


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_name: str  # as clients spell it
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout: float = 60.0  # seconds that a client may take to send a body
    tool_call_parser: str = DEFAULT_FORMAT  # how the model writes calls of tools
    aliases: tuple[str, ...] = ()  # other names of the model
    cors_origins: tuple[str, ...] = ()  # whose pages may read answers; "*" for all
    sse_ping: float = 5.0  # seconds of silence in a stream after which a ping is sent; 0 for none
    clamps_max_tokens: bool = False  # take more tokens than the context has room for as all that it has
    reveal_cached_tokens: bool = False  # a plan tells the cached token at a first difference to everyone


@dataclass(frozen=True, slots=True)
class ServerState:
    engine: AsyncEngine
    info: EngineInfo
    tokenizer: Tokenizer
    encoder: PromptEncoder
    metrics: EngineMetrics
    settings: ServerSettings
    models: ServedModels
    grammars: Grammars
    tool_format: ToolFormat
    tags: WrittenTags


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
