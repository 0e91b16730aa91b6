"""What a client wants of calls: which tools, how many, whether it insists; and what that asks of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from server.tools.body import NamedTool, Tool, ToolChoice
from server.tools.calls import ToolFormat, ToolReading


@dataclass(frozen=True, slots=True)
class CallWish:
    """`tools` are (index in the body, tool) of those that may be called. `insists`: the text is calls and nothing else;
    `is_named`: it is one call, of the one tool."""

    tools: tuple[tuple[int, Tool], ...]
    insists: bool
    is_named: bool
    parallel: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool) -> Self:
        if isinstance(choice, NamedTool):
            chosen = [each for each in enumerate(tools) if each[1].function.name == choice.function.name]
            return cls(tuple(chosen), insists=True, is_named=True, parallel=False)
        return cls(tuple(enumerate(tools)), insists=choice == "required", is_named=False, parallel=parallel)

    @property
    def enforced(self) -> list[int]:
        """Indices of the tools whose parameters the text is held to."""
        return [index for index, tool in self.tools if self.insists or tool.function.strict]

    def grammar(self, form: ToolFormat, answer: str | None) -> str | None:
        """Lark for the whole text; None where any will do. `answer` is the JSON schema that the text matches if it is
        no call. Raises BadRequest."""
        tools = [tool for _, tool in self.tools]
        if self.insists:
            return form.forced_grammar(tools, parallel=self.parallel, enforce_all=True)
        if answer is not None:
            return form.forced_grammar(tools, parallel=self.parallel, enforce_all=False, answer=answer)
        if self.enforced or not self.parallel:
            return form.free_grammar(tools, parallel=self.parallel)
        return None

    def reading(self, form: ToolFormat, *, eager: bool) -> ToolReading:
        return ToolReading(form.parser(eager=eager), is_named=self.is_named)
