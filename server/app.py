"""The HTTP application: routes, and errors in OpenAI's shape wherever they come from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from scheduler.messages import EngineInfo
from server.async_engine import AsyncEngine
from server.errors import ApiError, EngineFailure, error_body, error_response, json_response
from server.metrics import EngineMetrics
from server.prompt import PromptEncoder
from server.routes import chat, completions, models, operations
from server.state import ServerSettings, ServerState
from server.tokenizer import Tokenizer
from server.version import VERSION


def create_app(engine: AsyncEngine, info: EngineInfo, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """An application around an engine that has started. It stops the engine when it shuts down."""
    metrics = EngineMetrics(settings.model_name, info)
    engine.observer = metrics
    state = ServerState(engine, info, tokenizer, PromptEncoder(tokenizer, info), metrics, settings)
    app = FastAPI(title="pagekv", version=VERSION, lifespan=lifespan, redirect_slashes=False)
    app.state.server = state
    for routes in (completions, chat, models, operations):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, on_api_error)
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


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No such route (404), or not with this method (405)."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}."
    headers = dict(error.headers) if error.headers else None
    return json_response(error_body(message), error.status_code, headers)


async def on_unforeseen(_: Request, __: Exception) -> Response:
    """The exception itself is logged by the HTTP server; its text may hold what is no client's business."""
    return error_response(EngineFailure("The server failed to answer this request."))
