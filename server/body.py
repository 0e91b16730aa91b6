"""From the bytes of a request to a validated body, or to an error that names the field at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from server.body_size import check_body_size
from server.content_encoding import check_encoding, decode
from server.errors import BadRequest, BodyTooLarge, BodyTooSlow, ClientDisconnected, shorten
from server.json_depth import TOO_DEEP, is_too_deep
from server.state import ServerSettings

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")

MAX_NAME = 64  # characters of a field's name that an error repeats
MAX_DEPTH = 32  # of objects and lists within one another; no field has more than 5
QUICK_BYTES = 2**15  # a body of so many bytes is parsed and validated within a few milliseconds, whatever it holds
MAX_MEMBERS = 2048  # of one object; no field has more than 1024. Each one at fault would be an error by itself

# Fields whose value is the client's own JSON, where a null is a value and depth is its own matter.
VERBATIM = frozenset(
    {
        ("response_format", "json_schema", "schema"),
        ("structured_outputs", "json"),
        ("text", "format", "schema"),
        ("output_config", "format", "schema"),
        ("tools", "function", "parameters"),
        ("tools", "parameters"),
        ("tools", "input_schema"),
        ("messages", "content", "input"),
        ("chat_template_kwargs",),
    }
)
# What goes by another name now.
HINTS = {
    "guided_json": "; use structured_outputs.json",
    "guided_regex": "; use structured_outputs.regex",
    "guided_choice": "; use structured_outputs.choice",
    "guided_grammar": "; use structured_outputs.grammar",
    "functions": "; use tools",
    "function_call": "; use tool_choice",
}


async def read_body(request: Request, model: type[Body], settings: ServerSettings) -> Body:
    """Read JSON, of at most so many bytes and within so many seconds, and validate it strictly as `model`.

    Raises BadRequest, BodyTooLarge, BodyTooSlow or ClientDisconnected. A null in an object means what leaving the field
    out means.
    """
    raw = await read_raw(request, settings)
    return await beside_loop(request, lambda: parse_body(raw, model))


async def read_object(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The same without validating it."""
    raw = await read_raw(request, settings)
    return await beside_loop(request, lambda: parse_object(raw))


async def beside_loop(request: Request, work: Callable[[], Result]) -> Result:
    """The result of `work` over the body of this request: on a thread where the body is large, so that others are
    answered meanwhile."""
    declared = request.headers.get("content-length", "")
    is_compressed = "content-encoding" in request.headers
    if declared.isdecimal() and int(declared) <= QUICK_BYTES and not is_compressed:
        return work()
    return await asyncio.to_thread(work)


async def read_raw(request: Request, settings: ServerSettings) -> bytes:
    check_content_type(request.headers.get("content-type"))
    encoding = check_encoding(request.headers.get("content-encoding"))
    try:
        async with asyncio.timeout(settings.body_timeout):
            raw = await read_bytes(request, settings.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(settings.body_timeout) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    return raw if encoding is None else await asyncio.to_thread(decode, raw, encoding, settings.max_body_bytes)


def check_content_type(value: str | None) -> None:
    kind = (value or "").split(";", 1)[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(f"The content type must be application/json, not {kind or 'missing'}.")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body; refused from its declared length where there is one, else as soon as it passes `limit`."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
    return b"".join(parts)


def parse_object(raw: bytes) -> dict[str, Any]:
    check_body_size(raw)
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return data


def validate(data: dict[str, Any], model: type[Body]) -> Body:
    try:
        return model.model_validate(without_nulls(data), strict=True)
    except ValidationError as error:
        raise bad_field(error) from None


def parse_body(raw: bytes, model: type[Body]) -> Body:
    return validate(parse_object(raw), model)


def without_nulls(value: Any, at: tuple[str | int, ...] = (), path: tuple[str, ...] = ()) -> Any:
    """`value` without the null members of its objects; lists of numbers (a prompt) are not walked, nor what is
    VERBATIM. `at` is where it is in the body, and `path` the same without indices.

    Raises BadRequest for what is nested deeper than any field is, as JSON may be deeper than Python's stack, and for
    objects with more members than any field has.
    """
    if path in VERBATIM:
        refuse_deeper(is_too_deep(value), at, TOO_DEEP)
        return value
    refuse_deeper(len(at) > MAX_DEPTH, at, f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            param = field_path(at)
            where = f"Invalid {param!r}: the object" if param else "The body"
            raise BadRequest(f"{where} has more than {MAX_MEMBERS} members.", param=param, code="invalid_value")
        return {key: without_nulls(item, (*at, key), (*path, key)) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [without_nulls(item, (*at, index), path) for index, item in enumerate(value)]
    return value


def refuse_deeper(is_deeper: bool, at: Sequence[str | int], fault: str) -> None:
    if is_deeper:
        param = field_path(at)
        raise BadRequest(f"Invalid {param!r}: {fault}.", param=param, code="invalid_value")


def bad_field(error: ValidationError) -> BadRequest:
    """The first error of a validation, in OpenAI's words."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    member = (context["member"],) if "member" in context else ()
    param = context.get("param") or field_path((*first["loc"], *member))
    if first["type"] == "extra_forbidden":
        hint = HINTS.get(param or "", "")
        message = f"Unsupported field: {param!r} is not supported{hint}."
        return BadRequest(message, param=param, code="unsupported_parameter")
    if first["type"] == "missing":
        return BadRequest(f"Missing field: {param!r} is required.", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    where = f"Invalid {param!r}: " if param else ""
    return BadRequest(f"{where}{message}.", param=param, code="invalid_value")


def field_path(location: Sequence[int | str]) -> str | None:
    """('messages', 1, 'content') -> 'messages[1].content'. A name is repeated only so far. Names in angle brackets
    are those of a union's branches, which a client has never heard of; one by itself is a client's."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<") or len(location) == 1:
            path += ("." if path else "") + shorten(part, MAX_NAME)
    return path or None
