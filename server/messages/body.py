"""The body of `/v1/messages`, in Anthropic's fields. Whatever is not here is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from server.protocol import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, Salt
from server.strict import StrictModel, conflict
from server.tools.body import MAX_TOOLS, NAME

MAX_BREAKPOINTS = 4
SECONDS = {"5m": 300.0, "1h": 3600.0}

Json = dict[str, Any]


class Breakpoint(StrictModel):
    """Keep the K/V of the prompt up to here for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: str | None = None  # whom Anthropic shares it with; here `cache_salt` says that

    @property
    def seconds(self) -> float:
        return SECONDS[self.ttl]


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list)  # of an earlier answer; no part of a prompt
    cache_control: Breakpoint | None = None


class ThinkingBlock(StrictModel):
    """What the assistant thought in an earlier turn; the template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    cache_control: None = None


class RedactedThinkingBlock(StrictModel):
    """Thoughts that only Anthropic can read: left out."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: None = None


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: Json
    caller: Json | None = None
    toolset_name: str | None = None
    cache_control: Breakpoint | None = None


def as_blocks(value: Any) -> Any:
    """A string is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def kind_of(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"<{kind}>"  # in brackets: no part of the path that an error names


class ResultText(StrictModel):
    """A part of a result. A breakpoint on one covers all of its result."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list)
    cache_control: Breakpoint | None = None


class ToolReference(StrictModel):
    """A result that names a tool: what a search for tools gives."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Breakpoint | None = None

    @property
    def text(self) -> str:
        return self.tool_name


ResultPart = Annotated[
    Annotated[ResultText, Tag("<text>")] | Annotated[ToolReference, Tag("<tool_reference>")],
    Discriminator(
        kind_of,
        custom_error_type="unsupported_block",
        custom_error_message="a block of type text or tool_reference is wanted; others are not supported",
    ),
]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: list[ResultPart] = Field(default_factory=list, fail_fast=True)
    is_error: bool = False
    toolset_name: str | None = None
    cache_control: Breakpoint | None = None

    _blocks = field_validator("content", mode="before")(as_blocks)


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(
        kind_of,
        custom_error_type="unsupported_block",
        custom_error_message=(
            "a block of type text, tool_use, tool_result, thinking or redacted_thinking is wanted; "
            "others are not supported"
        ),
    ),
]

BLOCKS_OF = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
    "system": {"text"},
}


class Turn(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: list[Block] = Field(fail_fast=True)

    _blocks = field_validator("content", mode="before")(as_blocks)

    @model_validator(mode="after")
    def check_blocks(self) -> Self:
        for block in self.content:
            if block.type not in BLOCKS_OF[self.role]:
                raise ValueError(f"a turn of the {self.role} has no {block.type} blocks")
        return self


class Tool(StrictModel):
    """A tool of the client's. How its calls are streamed, found and made by other tools is Anthropic's own matter."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: Json
    strict: bool = False
    cache_control: Breakpoint | None = None
    eager_input_streaming: bool = False
    defer_loading: bool = False
    allowed_callers: list[str] = Field(default_factory=list)
    input_examples: list[Json] = Field(default_factory=list)


class OtherTool(StrictModel):
    """A tool that Anthropic's servers run, or that only Anthropic's models know: the model is not told of it."""

    model_config = ConfigDict(extra="allow")

    type: str
    cache_control: Breakpoint | None = None


def kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<custom>" if kind in (None, "custom") else "<other>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")], Discriminator(kind_of_tool)
]


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name goes with type 'tool', and with no other")
        return self


class Thinking(StrictModel):
    """A hint, which templates know as `enable_thinking`; adaptive and between_tools leave it to the model. What the
    model thinks counts as its answer, so there is no budget to keep."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(StrictModel):
    """`effort` is a hint, which templates know as `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = None


class CountBody(StrictModel):
    """What makes the prompt: all that `/v1/messages/count_tokens` takes."""

    model: str
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: list[TextBlock] = Field(default_factory=list, fail_fast=True)
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Breakpoint | None = None
    # How Anthropic's servers would edit a conversation that grows long: this one takes it as it comes.
    context_management: Json | None = None
    # Whose request it is, and where it may be computed.
    diagnostics: Json | None = None
    inference_geo: str | None = None
    speed: Literal["standard", "fast"] = "standard"
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: list[str] = Field(default_factory=list)

    _blocks = field_validator("system", mode="before")(as_blocks)

    @model_validator(mode="after")
    def check_turns(self) -> Self:
        """As Anthropic has it, the assistant's last turn may be empty: then it is a new one."""
        last = len(self.messages) - 1
        for index, turn in enumerate(self.messages):
            if not turn.content and not (0 < index == last and turn.role == "assistant"):
                raise conflict(f"messages[{index}].content", "a turn has one block or more")
        return self

    @model_validator(mode="after")
    def check_breakpoints(self) -> Self:
        marks = list(self.breakpoints())
        if len(marks) > MAX_BREAKPOINTS:
            raise conflict("cache_control", f"at most {MAX_BREAKPOINTS} breakpoints are supported, not {len(marks)}")
        if any(later.seconds > earlier.seconds for earlier, later in zip(marks, marks[1:], strict=False)):
            raise conflict("cache_control", "a breakpoint with ttl '1h' comes before those with '5m'")
        return self

    def breakpoints(self) -> Iterator[Breakpoint]:
        """In the order of the prompt: tools, system, messages."""
        for block in (*self.tools, *self.system, *(block for turn in self.messages for block in turn.content)):
            mark = breakpoint_of(block)
            if mark is not None:
                yield mark
        if self.cache_control is not None:
            yield self.cache_control


def breakpoint_of(block: AnyTool | Block) -> Breakpoint | None:
    """Its own, or the last one of its parts."""
    parts = block.content if isinstance(block, ToolResultBlock) else ()
    marks = [part.cache_control for part in parts if part.cache_control is not None]
    return block.cache_control or (marks[-1] if marks else None)


class MessagesBody(CountBody):
    """`max_tokens` of 0 computes the prompt, for the cache, and generates nothing."""

    max_tokens: int = Field(ge=0)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default_factory=list, max_length=MAX_STOPS
    )
    stream: bool = False
    temperature: float | None = Field(None, ge=0.0, le=1.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    cache_salt: Salt | None = None
