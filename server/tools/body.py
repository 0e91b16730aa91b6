"""The fields of a chat that are about tools, and of the messages that tell of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Discriminator, Field, Tag

from server.strict import StrictModel, conflict

MAX_TOOLS = 128  # OpenAI's
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

Json = dict[str, Any]


class Function(StrictModel):
    """`strict` holds the arguments of every call to `parameters`, also of calls the model makes of its own accord."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: Json = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


class Tool(StrictModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> Json:
        """As chat templates know it: without `strict`, which is no matter of the model's."""
        function: Json = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": "function", "function": function | {"parameters": self.function.parameters}}


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


def check_object(value: str) -> str:
    """Templates want the object itself. An empty text is what some clients keep of a call without arguments."""
    try:
        is_object = isinstance(orjson.loads(value or "{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    if not is_object:
        raise ValueError("the text of a JSON object is wanted")
    return value or "{}"


Arguments = Annotated[str, AfterValidator(check_object)]


class FunctionCall(StrictModel):
    name: str = Field(min_length=1)
    arguments: Arguments


class ToolCall(StrictModel):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> Json:
        arguments = orjson.loads(self.function.arguments)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool) -> None:
    """Raises the error of a validation."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise conflict(f"tools[{index}].function.name", f"there is another function {name!r}")
    if not tools:
        if choice is not None and choice != "none":
            raise conflict("tool_choice", "it is allowed only with tools")
        if not parallel:
            raise conflict("parallel_tool_calls", "it is allowed only with tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise conflict("tool_choice", f"there is no function {choice.function.name!r} among the tools")
