"""The fields of a chat that are about tools, and of the messages that tell of their calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from server.json_depth import TOO_DEEP, is_too_deep
from server.strict import StrictModel, conflict

MAX_TOOLS = 128  # OpenAI's
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

Json = dict[str, Any]


class Function(StrictModel):
    """`strict` holds the arguments of every call to `parameters`, also of calls the model makes of its own accord."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Json = Field(default_factory=dict)
    strict: bool = False

    @property
    def takes_nothing(self) -> bool:
        """Whether it has no parameters: none are given, or a list of none."""
        given = self.parameters
        says_more = given.keys() - {"type", "properties", "required", "title", "description", "$schema"}
        return not given or (given.get("properties") == {} and not given.get("required") and not says_more)

    @property
    def arguments(self) -> Json:
        """The schema of the arguments, where they are held to one: those of a call are an object in any case."""
        if self.takes_nothing:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        kinds = self.parameters.get("type", "object")
        return self.parameters | {"type": "object" if isinstance(kinds, list) and "object" in kinds else kinds}


class Tool(StrictModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> Json:
        """As chat templates know it: without `strict`, which is no matter of the model's."""
        function: Json = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


ChoiceMode = Literal["none", "auto", "required"]


def kind_of_choice(value: Any) -> str:
    return "<named>" if isinstance(value, dict | StrictModel) else "<mode>"


ToolChoice = Annotated[
    Annotated[ChoiceMode, Tag("<mode>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(kind_of_choice),
]


def arguments_in(text: str) -> Json:
    """The object that the arguments of an earlier call spell, which is what templates want. A call that was cut off has
    none, as in vLLM, and neither has an empty text, which some clients keep. Raises ValueError."""
    try:
        found = json.loads(text or "{}", strict=False)  # models write line breaks within strings as they are
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        found = {} if text.lstrip().startswith("{") else None
    if not isinstance(found, dict):
        raise ValueError("the text of a JSON object is wanted")
    if is_too_deep(found):
        raise ValueError(TOO_DEEP)
    # An escape may spell half a surrogate pair, which no tokenizer takes.
    spelled: Json = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    return spelled


def check_arguments(text: str) -> str:
    arguments_in(text)
    return text


Arguments = Annotated[str, AfterValidator(check_arguments)]


class FunctionCall(StrictModel):
    name: str = Field(min_length=1)
    arguments: Arguments

    def for_template(self) -> Json:
        return {"name": self.name, "arguments": arguments_in(self.arguments)}


class ToolCall(StrictModel):
    """A call that the assistant made earlier in the conversation. Clients that collect a stream keep its `index`."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> Json:
        return {"id": self.id, "type": "function", "function": self.function.for_template()}


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises the error of a validation."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise conflict(f"tools[{index}].function.name", f"there is another function {name!r}")
    if not tools and choice not in (None, "none", "auto"):
        raise conflict("tool_choice", "it is allowed only with tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise conflict("tool_choice", f"there is no function {choice.function.name!r} among the tools")
