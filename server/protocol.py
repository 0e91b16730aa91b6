"""The bodies of requests, field by field. Whatever is not here is refused by name; nothing is accepted and ignored.

A field whose only supported value is the one that means "off" (`n` of 1, no `tools`) takes that value alone, so that a
client which always sends it works, and one which wants the feature is told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, FailFast, Field, Tag, TypeAdapter, WithJsonSchema, field_validator, model_validator

from server.strict import StrictModel as StrictModel
from server.strict import conflict as conflict
from server.strict import lacking, misplaced
from server.structured.body import ResponseFormat, StructuredOutputs
from server.token_ids import TokenIds
from server.tools.body import MAX_TOOLS, FunctionCall, Tool, ToolCall, ToolChoice, check_tools

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 128  # in one body
MAX_CHOICES = 128  # of all prompts of a body together
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_MESSAGES = 4096
MAX_METADATA = 16  # OpenAI's
MAX_AUTHOR = 256  # characters of the name of a message's author
INT64 = 2**63

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
ONE_PROMPT_SCHEMA = {"anyOf": [{"type": "string", "minLength": 1}, _IDS_SCHEMA]}
PROMPTS_SCHEMA = {"anyOf": [*ONE_PROMPT_SCHEMA["anyOf"], {"type": "array", "items": ONE_PROMPT_SCHEMA}]}

Json = dict[str, Any]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
Verbosity = Literal["low", "medium", "high"]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


class StreamOptions(StrictModel):
    """With `continuous_usage_stats` (vLLM's) and `include_usage` every chunk tells the usage so far of its choice."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class CacheFields(StrictModel):
    """What a request may do with the cache. `ttl` is in seconds, from the last use."""

    read: bool = True
    write: bool = True
    ttl: float | None = Field(default=None, gt=0)
    pin: bool = False

    @model_validator(mode="after")
    def check_pin(self) -> Self:
        if self.pin and not self.write:
            raise conflict("cache.pin", "there is nothing to pin with write=false")
        return self


class GenerationBody(StrictModel):
    """What completions and chat completions share: how tokens are chosen, when to stop, how to answer."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    # Left out, these are the model's own defaults (EngineInfo.sampling).
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=MAX_BIASES
    )
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    stop: tuple[str, ...] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=1024)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    priority: int = Field(0, ge=-INT64, lt=INT64)
    request_id: RequestId | None = None
    user: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Salt | None = None
    cache: CacheFields = CacheFields()
    cache_report: bool = False

    @field_validator("stop", mode="wrap")
    @classmethod
    def one_or_more_stops(cls, value: Any, _: Any) -> tuple[str, ...]:
        """A string or a list of strings. Written out so that an error names `stop`, not a branch of a union."""
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("a string or a list of strings is wanted")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are supported, not {len(stops)}")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a stop string has from 1 to {MAX_STOP_CHARS} characters")
        return tuple(stops)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def keep_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("1 or more tokens are kept, or as many as fit with -1")
        return value

    @model_validator(mode="after")
    def check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "it is allowed only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise conflict("prompt_logprobs", "they are not available with stream=true")
        limit = self.wanted_tokens
        if limit is not None and self.min_tokens > limit:
            raise conflict("min_tokens", f"{self.min_tokens} is above max_tokens, which is {limit}")
        if self.structured_outputs is not None and self.has_format:
            raise conflict("structured_outputs", "it does not go with a response_format")
        return self

    @property
    def has_format(self) -> bool:
        """Whether the text must be JSON of some kind, by OpenAI's field."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to generate, where the client said so."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def logprobs_wanted(self) -> int | None:
        """Alternatives per token: 0 for the chosen token alone, None for no logprobs at all."""
        raise NotImplementedError

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """Likewise for each token of the prompt."""
        return self.prompt_logprobs


class CompletionBody(GenerationBody):
    # split and checked by server/prompt.py, which can name prompt[3][17]
    prompt: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0)  # 0 asks for the echo alone
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int = Field(1, ge=1, le=1)
    echo: bool = False

    @model_validator(mode="after")
    def check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise conflict("max_tokens", "it is 1 at least, unless echo=true asks for the prompt")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """An echo has logprobs of its own; where both are asked for, the engine gives what covers both."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)


class TextPart(StrictModel):
    """Marks of prompt caches are taken: prompts are cached without them."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Json | None = None
    prompt_cache_breakpoint: Json | None = None
    annotations: list[Any] = Field(default_factory=list)


class RefusalPart(StrictModel):
    """What the assistant said where it refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def kind_of_part(part: Any) -> str:
    """In brackets, so that it is no part of the path that an error names."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "<refusal>" if kind == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(kind_of_part)
]
TEXT_PARTS = TypeAdapter(Annotated[list[Part], FailFast()])


class Message(StrictModel):
    """`tool` answers a call of the assistant's earlier on, whose message may have calls and no content. `function` and
    `function_call` are their older names.

    `name`, and what the assistant thought (`reasoning_content`, or `reasoning`), are given to the template. What an
    answer brought besides comes back with it and is no part of a prompt: `annotations`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[TextPart | RefusalPart, ...] | None = None
    name: str | None = Field(None, max_length=MAX_AUTHOR)
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] = Field(default_factory=list)
    audio: None = None

    @field_validator("content", mode="wrap")
    @classmethod
    def text_or_parts(cls, value: Any, check: Any) -> Any:
        """Written out so that an error names the part at fault, not a branch of a union."""
        if isinstance(value, list):
            return tuple(TEXT_PARTS.validate_python(value, strict=True))
        if value is None or isinstance(value, str):
            return value
        raise ValueError("a string or a list of text parts is wanted")

    @model_validator(mode="after")
    def check_role(self) -> Self:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise lacking("content")
        for member in OF_THE_ASSISTANT:
            if getattr(self, member) and self.role != "assistant":
                raise misplaced(member, "it is the assistant's alone")
        if self.role == "function" and self.name is None:
            raise lacking("name")
        if self.role == "tool" and self.tool_call_id is None:
            raise lacking("tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise misplaced("tool_call_id", "it goes with role 'tool' alone")
        return self

    def for_template(self) -> dict[str, Any]:
        """`developer` is OpenAI's newer word for `system`, which is the one templates know; they join strings, and so
        get one where there is no content. Parts stay parts, for templates that take them (server/text)."""
        made: dict[str, Any] = {"role": NEWER_ROLES.get(self.role, self.role)}
        made["content"] = self.content or self.refusal or ""
        if not isinstance(made["content"], str):
            made["content"] = [{"type": "text", "text": part.text} for part in made["content"]]
        calls = [call.for_template() for call in self.tool_calls]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.for_template()})
        thought = self.reasoning_content or self.reasoning
        given = {
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": thought,
        }
        return made | {key: value for key, value in given.items() if value}


NEWER_ROLES = {"developer": "system", "function": "tool"}
OF_THE_ASSISTANT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")

# What a chat template is given, or what transformers is told about it, by other fields or not at all.
RESERVED_VARIABLES = frozenset(
    ("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length")
    + ("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", "raise_exception")
    + ("strftime_now",)
)


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None  # None: auto, where there are tools
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None  # None: yes, unless the final message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=MAX_METADATA)
    # What OpenAI says of these concerns its own service: they are taken, and change nothing about an answer.
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    store: bool = False
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier = "auto"
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"
    prompt_cache_options: Json | None = None
    prediction: Json | None = None  # a text that the answer may repeat, which would make it faster
    verbosity: Verbosity = "medium"  # a hint to models that were taught it
    # A hint too, which is given to the template as a variable of this name.
    reasoning_effort: str | None = Field(None, max_length=MAX_METADATA)
    # And of these only what is the case anyway is taken.
    modalities: list[Literal["text"]] = Field(default_factory=list, max_length=1)

    @model_validator(mode="after")
    def check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "it is allowed only with logprobs=true")
        if self.max_tokens is not None and self.wanted_tokens != self.max_tokens:
            raise conflict("max_completion_tokens", "it differs from max_tokens, the older name of the same field")
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict("add_generation_prompt", "it does not go with continue_final_message")
        check_tools(self.tools, self.tool_choice)
        if self.structured_outputs is not None and self.may_call:
            raise conflict("structured_outputs", "it goes with tools only where tool_choice is 'none'")
        return self

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @field_validator("chat_template_kwargs")
    @classmethod
    def only_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in RESERVED_VARIABLES:
                raise conflict(f"chat_template_kwargs.{name}", "this is no variable of the template")
        return value

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is given besides the conversation."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def generation_prompt(self) -> bool:
        """Whether the template opens the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
