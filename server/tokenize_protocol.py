"""The bodies of /tokenize and /detokenize, in vLLM's fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.protocol import MAX_MESSAGES, Message
from server.strict import StrictModel
from server.token_ids import TokenIds
from server.tools.body import MAX_TOOLS, Tool


class TokenizeBody(StrictModel):
    """A text. Special tokens are those that a completion's prompt begins with, as BOS."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(StrictModel):
    """A conversation, in fields of a chat completion. The chat template writes all special tokens there are."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False


OWN_FIELDS = {"add_special_tokens", "return_token_strs"}  # those that a chat completion does not have


class DetokenizeBody(StrictModel):
    model: str | None = None
    tokens: TokenIds
