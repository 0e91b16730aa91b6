"""The body of `/v1/responses`, in OpenAI's fields. Whatever is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from server.protocol import MAX_LOGPROBS, MAX_MESSAGES, MAX_METADATA, Salt
from server.strict import StrictModel
from server.tools.body import MAX_TOOLS, NAME, Arguments, ChoiceMode, kind_of_choice

Json = dict[str, Any]


class Part(StrictModel):
    """A text. What an answer said besides (`annotations`, `logprobs`) comes back with it and is no part of a prompt."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: list[Any] = Field(default_factory=list)


def as_parts(value: Any) -> Any:
    """A string is short for one part of text."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class MessageItem(StrictModel):
    """A message: a client's own, or the item of an earlier answer, with its `id` and `status`."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part] = Field(fail_fast=True)
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    _parts = field_validator("content", mode="before")(as_parts)


class CallItem(StrictModel):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: Arguments
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class CallOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: list[Part] = Field(fail_fast=True)
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    _parts = field_validator("output", mode="before")(as_parts)


def kind_of(item: Any) -> str:
    """In brackets, so that it is no part of the path that an error names."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")],
    Discriminator(
        kind_of,
        custom_error_type="unsupported_item",
        custom_error_message=(
            "an item of type message, function_call or function_call_output is wanted; others are not supported"
        ),
    ),
]


class FunctionTool(StrictModel):
    """A function of the client's. Tools that a server would run are refused by their `type`."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Json = Field(default_factory=dict)
    strict: bool = False


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictModel):
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    json_schema: Json = Field(alias="schema")
    description: str | None = None
    strict: bool = False


def format_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<schema>" if kind == "json_schema" else "<text>"


class TextConfig(StrictModel):
    format: (
        Annotated[
            Annotated[TextFormat, Tag("<text>")] | Annotated[SchemaFormat, Tag("<schema>")], Discriminator(format_of)
        ]
        | None
    ) = None
    verbosity: Literal["medium"] = "medium"


class StreamOptions(StrictModel):
    include_obfuscation: Literal[False] = False


class ResponsesBody(StrictModel):
    """Nothing is kept between requests: what refers to an earlier answer is refused. `store` is taken, as clients send
    it unasked, and the answer says that it was not stored."""

    model: str | None = None
    input: list[Item] = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list, fail_fast=True)
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextConfig = TextConfig()
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: (
        Annotated[
            Annotated[ChoiceMode, Tag("<mode>")] | Annotated[NamedFunction, Tag("<named>")],
            Discriminator(kind_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool = False
    metadata: dict[str, str] = Field(default_factory=dict, max_length=MAX_METADATA)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"
    cache_salt: Salt | None = None

    @field_validator("input", mode="before")
    @classmethod
    def one_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value
