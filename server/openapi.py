"""The bodies of requests in `/openapi.json`. Routes check them themselves, so FastAPI knows nothing of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.operator_protocol import CacheTargetBody, LoadAdapterBody, UnloadAdapterBody
from server.protocol import ChatBody, CompletionBody

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/cache/drop": (CacheTargetBody,),
    "/v1/cache/invalidate": (CacheTargetBody,),
    "/v1/cache/plan": (CompletionBody, ChatBody),
    "/v1/load_lora_adapter": (LoadAdapterBody,),
    "/v1/unload_lora_adapter": (UnloadAdapterBody,),
}


def describe_bodies(app: FastAPI) -> None:
    """Have the application's OpenAPI document tell what each route takes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = with_bodies(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # how FastAPI's documentation extends it


def with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    models = sorted({model for kinds in BODIES.values() for model in kinds}, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, kinds in BODIES.items():
        schemas = [references[kind, "validation"] for kind in kinds]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {"application/json": {"schema": schema}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
