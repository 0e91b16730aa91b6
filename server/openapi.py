"""What `/openapi.json` tells of each route: its body, an example of it, and of its answers. Routes check bodies
themselves, so FastAPI knows nothing of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.examples import BAD_REQUEST, EXAMPLES, MESSAGES_BAD_REQUEST, Example
from server.messages.body import CountBody, MessagesBody
from server.operator_protocol import CacheTargetBody, LoadAdapterBody, UnloadAdapterBody
from server.protocol import ChatBody, CompletionBody
from server.responses.body import ResponsesBody
from server.tokenize_protocol import DetokenizeBody, TokenizeBody, TokenizeChatBody

Json = dict[str, Any]

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/completions/render": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/chat/completions/render": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
    "/v1/cache/drop": (CacheTargetBody,),
    "/v1/cache/invalidate": (CacheTargetBody,),
    "/v1/cache/plan": (CompletionBody, ChatBody),
    "/v1/load_lora_adapter": (LoadAdapterBody,),
    "/v1/unload_lora_adapter": (UnloadAdapterBody,),
}


def describe_bodies(app: FastAPI) -> None:
    """Have the application's OpenAPI document tell what each route takes and gives."""

    def document() -> Json:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = with_answers(with_bodies(made))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # how FastAPI's documentation extends it


def with_bodies(document: Json) -> Json:
    models = sorted({model for kinds in BODIES.values() for model in kinds}, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, kinds in BODIES.items():
        schemas = [references[kind, "validation"] for kind in kinds]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {"schema": schema, "example": EXAMPLES["post", path].request}
        body = {"required": True, "content": {"application/json": content}}
        document["paths"][path]["post"]["requestBody"] = body
    return document


def with_answers(document: Json) -> Json:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found = EXAMPLES.get((method, path))
            if found is None:
                continue
            operation["responses"]["200"] = {"description": "Success", **content_of(found)}
            if found.request is not None:
                error = MESSAGES_BAD_REQUEST if path.startswith("/v1/messages") else BAD_REQUEST
                content = {"application/json": {"example": error}}
                operation["responses"]["400"] = {"description": "The field at fault is named", "content": content}
                operation["responses"].pop("422", None)
    return document


def content_of(found: Example) -> Json:
    if found.response is None:
        return {}
    kind = "text/plain" if isinstance(found.response, str) else "application/json"
    content = {kind: {"example": found.response}}
    if found.events is not None:
        content["text/event-stream"] = {"example": found.events}
    return {"content": content}
