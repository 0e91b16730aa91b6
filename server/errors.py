"""What goes wrong between a request and its answer, and how OpenAI's API spells it.

ApiError                    any error with an HTTP status and OpenAI's error object
+-- BadRequest              400: the body is not JSON, or a field has a bad value
|   +-- ContextTooLong      400: prompt and max_tokens exceed the model's context
+-- UnknownModel            404
+-- RouteError              404, 405
+-- UnknownAdapter          404
+-- BodyTooSlow             408
+-- BodyTooLarge            413
+-- UnsupportedEncoding     415: the body is compressed in a way that is not known here
+-- EngineFailure           500: the engine failed this request
+-- Unavailable             503: the engine is gone, or the server is shutting down
ClientDisconnected          nobody is left to answer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

MAX_MESSAGE = 2000  # characters; what a client sent is repeated to it, but not at any length
MAX_PARAM = 200
RETRY_AFTER = 5  # seconds; suggested to clients when the machine is too busy


class ApiError(Exception):
    """An error that is answered as `{"error": {"message", "type", "param", "code"}}`.

    `param` is the path of the field at fault, such as `messages[1].content`.
    """

    status = 500
    kind = "server_error"
    headers: dict[str, str] | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = shorten(message, MAX_MESSAGE)
        self.param = None if param is None else shorten(param, MAX_PARAM)
        self.code = code

    def body(self) -> dict[str, Any]:
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


class BadRequest(ApiError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(BadRequest):
    """Names both numbers: what the request wants and what the model has, in tokens. With `least` the prompt was not
    counted to its end."""

    def __init__(
        self, prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, param: str, least: bool = False
    ) -> None:
        wanted = f"{'at least ' if least else ''}{prompt_tokens} tokens of prompt"
        if max_tokens is None:
            wanted += " and room for at least 1 token of output"
        else:
            wanted += f" + {max_tokens} of output = {prompt_tokens + max_tokens} tokens"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the request needs {wanted}.",
            param=param,
            code="context_length_exceeded",
        )


class UnknownModel(ApiError):
    status = 404
    kind = "invalid_request_error"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        message = f"The model {name!r} does not exist. Served here: {', '.join(served)}."
        super().__init__(message, param="model", code="model_not_found")


class RouteError(ApiError):
    """No such route, or not with this method."""

    kind = "invalid_request_error"

    def __init__(self, message: str, status: int, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class UnknownAdapter(ApiError):
    status = 404
    kind = "invalid_request_error"

    def __init__(self, name: str) -> None:
        super().__init__(f"The lora adapter {name!r} cannot be found.", param="lora_name", code="adapter_not_found")


class BodyTooSlow(ApiError):
    """The rest of the body may still come, so the connection is of no more use."""

    status = 408
    kind = "invalid_request_error"
    headers = {"Connection": "close"}

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds:g} seconds.", code="request_timeout")


class BodyTooLarge(ApiError):
    status = 413
    kind = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.", code="request_too_large")


class UnsupportedEncoding(ApiError):
    status = 415
    kind = "invalid_request_error"

    def __init__(self, name: str, supported: Sequence[str]) -> None:
        message = f"The content encoding {shorten(name, 40)!r} is not supported; {', '.join(supported)} are."
        super().__init__(message, code="unsupported_encoding")
        self.headers = {"Accept-Encoding": ", ".join(supported)}


class EngineFailure(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine_error")


class Unavailable(ApiError):
    """`retry_after` is the number of seconds after which it is worth trying again, where that is known."""

    status = 503
    kind = "service_unavailable"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.headers = None if retry_after is None else {"Retry-After": str(retry_after)}


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


def shorten(text: str, limit: int) -> str:
    """`text`, or where it is longer its beginning and an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)
