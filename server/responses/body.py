"""The body of `/v1/responses`, in OpenAI's fields. Whatever is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from server.protocol import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA,
    RefusalPart,
    Salt,
    ServiceTier,
    Verbosity,
    kind_of_part,
)
from server.strict import StrictModel
from server.tools.body import MAX_TOOLS, NAME, Arguments, ChoiceMode, kind_of_choice

Json = dict[str, Any]


class TextPart(StrictModel):
    """A text. What an answer said besides (`annotations`, `logprobs`) comes back with it and is no part of a prompt."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)
    prompt_cache_breakpoint: Json | None = None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(kind_of_part)
]


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
    phase: str | None = None

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


class ThoughtPart(StrictModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(StrictModel):
    """What the assistant thought before its next message. The summary and the encrypted thoughts of another server's
    model are left out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ThoughtPart] = Field(default_factory=list)
    content: list[ThoughtPart] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def kind_of(item: Any) -> str:
    """In brackets, so that it is no part of the path that an error names."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        kind_of,
        custom_error_type="unsupported_item",
        custom_error_message=(
            "an item of type message, function_call, function_call_output or reasoning is wanted; "
            "others are not supported"
        ),
    ),
]


class FunctionTool(StrictModel):
    """A function of the client's. How it is found and by whom it may be called is OpenAI's own matter."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Json = Field(default_factory=dict)
    strict: bool = False
    defer_loading: bool = False
    allowed_callers: list[str] = Field(default_factory=list)


class OtherTool(StrictModel):
    """A tool that OpenAI's servers run, or whose calls are no JSON: the model is not told of it."""

    model_config = ConfigDict(extra="allow")

    type: str


def kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<function>" if kind in (None, "function") else "<other>"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")], Discriminator(kind_of_tool)
]


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
    verbosity: Verbosity = "medium"  # a hint to models that were taught it


class StreamOptions(StrictModel):
    include_obfuscation: Literal[False] = False


class Reasoning(StrictModel):
    """`effort` is a hint, given to the template as `reasoning_effort`. Summaries are not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    # Parts of items that no answer of this server has.
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


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
    include: list[Included] = Field(default_factory=list, fail_fast=True)
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextConfig = TextConfig()
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS)
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
    service_tier: ServiceTier = "auto"
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"
    prompt_cache_options: Json | None = None
    client_metadata: Json | None = None
    max_tool_calls: int | None = None  # of tools that a server runs
    reasoning: Reasoning = Reasoning()
    chat_template_kwargs: Json = Field(default_factory=dict, max_length=MAX_METADATA)
    cache_salt: Salt | None = None

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs is not None

    @field_validator("input", mode="before")
    @classmethod
    def one_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value
