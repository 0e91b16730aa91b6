"""Errors as Anthropic's API spells them."""

from __future__ import annotations

from typing import Any

from server.errors import ApiError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(message: str, status: int) -> dict[str, Any]:
    """The field at fault is named in the message, as there is no place of its own for it."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def of_api_error(error: ApiError) -> dict[str, Any]:
    return messages_error(error.message, error.status)
