"""The bodies of what operators ask of a running server: of its cache, and of its adapters."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema, model_validator

from server.protocol import MAX_MESSAGES, ONE_PROMPT_SCHEMA, Message, Salt, StrictModel, conflict

TARGETS = ("prompt", "messages", "block_hash", "adapter", "all", "cache_salt")
WITH_PROMPT = ("model", "cache_salt", "blocks")


class CacheTargetBody(StrictModel):
    """What to drop or invalidate: exactly one of TARGETS. A prompt, as text, ids or messages, comes with the model and
    the salt it was sent with, and may name some of its blocks."""

    model: str | None = None
    prompt: Annotated[Any, WithJsonSchema(ONE_PROMPT_SCHEMA)] = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    block_hash: str | None = Field(None, min_length=1)
    adapter: str | None = Field(None, min_length=1)
    cache_salt: Salt | None = None
    blocks: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1, fail_fast=True)
    all: bool | None = None

    @model_validator(mode="after")
    def check_target(self) -> Self:
        if self.all is False:
            raise conflict("all", "its only value is true")
        given = self.model_fields_set
        named = [name for name in TARGETS if name in given]
        if named[1:] == ["cache_salt"] and self.is_prompt:
            named.pop()
        if not named:
            raise conflict(None, f"exactly one of {', '.join(TARGETS)} is wanted")
        if len(named) > 1:
            raise conflict(named[1], f"it does not go with {named[0]}; exactly one of {', '.join(TARGETS)} is wanted")
        misplaced = [name for name in WITH_PROMPT if name in given and name not in named]
        if misplaced and not self.is_prompt:
            raise conflict(misplaced[0], f"it goes with a prompt or messages, not with {named[0]}")
        return self

    @property
    def is_prompt(self) -> bool:
        return bool(self.model_fields_set & {"prompt", "messages"})


class LoadAdapterBody(StrictModel):
    """vLLM's. `load_inplace` makes loading what is already loaded a success rather than an error."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


class UnloadAdapterBody(StrictModel):
    lora_name: str = Field(min_length=1)
