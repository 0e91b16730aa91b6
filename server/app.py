"""The HTTP application: routes, and errors in the shape of the API that was asked, wherever they come from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from scheduler.commands import AdapterInfo
from scheduler.messages import EngineInfo
from server.async_engine import AsyncEngine
from server.errors import (
    MAX_MESSAGE,
    ApiError,
    ClientDisconnected,
    EngineFailure,
    RouteError,
    error_response,
    json_response,
    shorten,
)
from server.head_requests import HeadRequests
from server.messages.errors import of_api_error
from server.metrics import EngineMetrics
from server.openapi import describe_bodies
from server.prompt import PromptEncoder
from server.routes import adapters as adapter_routes
from server.routes import cache, chat, completions, messages, models, operations, render, responses, tokenize
from server.served import ServedModels
from server.state import ServerSettings, ServerState
from server.structured.grammars import Grammars
from server.structured.tags import WrittenTags
from server.tokenizer import Tokenizer
from server.tools.registry import FORMATS
from server.version import VERSION

CLIENT_CLOSED_REQUEST = 499  # nginx's status for an answer that nobody reads


def create_app(
    engine: AsyncEngine,
    info: EngineInfo,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    adapters: Sequence[AdapterInfo] = (),
) -> FastAPI:
    """An application around an engine that has started, and has these adapters. It stops the engine when it shuts
    down."""
    metrics = EngineMetrics(settings.model_name, info)
    engine.observer = metrics
    served = ServedModels(settings.model_name, adapters, settings.aliases)
    tool_format = FORMATS[settings.tool_call_parser]
    tags = WrittenTags.of(tokenizer, tool_format)
    state = ServerState(
        engine=engine,
        info=info,
        tokenizer=tokenizer,
        encoder=PromptEncoder(tokenizer, info, tool_format),
        metrics=metrics,
        settings=settings,
        models=served,
        grammars=Grammars(engine, tokenizer, tags),
        tool_format=tool_format,
        tags=tags,
    )
    app = FastAPI(title="pagekv", version=VERSION, lifespan=lifespan, redirect_slashes=False)
    app.state.server = state
    for routes in (completions, chat, responses, messages, models, tokenize, render, cache, adapter_routes, operations):
        app.include_router(routes.router)
    describe_bodies(app)
    app.add_middleware(HeadRequests)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=("*",), allow_headers=("*",)
        )
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientDisconnected, on_client_disconnected)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_unforeseen)
    return app


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    state.engine.attach()
    yield
    await state.engine.stop()
    state.encoder.close()


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer_error(request, error)


def answer_error(request: Request, error: ApiError) -> Response:
    """In OpenAI's shape, but for those who speak Anthropic's API."""
    if request.url.path.startswith("/v1/messages"):
        return json_response(of_api_error(error), error.status, error.headers)
    return error_response(error)


async def on_client_disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No such route (404), or not with this method (405)."""
    assert isinstance(error, HTTPException)
    message = shorten(f"{error.detail}: {request.method} {request.url.path}.", MAX_MESSAGE)
    return answer_error(request, RouteError(message, error.status_code, dict(error.headers or {})))


async def on_unforeseen(request: Request, __: Exception) -> Response:
    """The exception itself is logged by the HTTP server, which then hangs up; its text may hold what is no client's
    business."""
    response = answer_error(request, EngineFailure("The server failed to answer this request."))
    response.headers["connection"] = "close"  # so that no next request is sent into it
    return response
