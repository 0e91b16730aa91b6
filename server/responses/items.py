"""The items of a response's output, while they grow: a message of text, or a call of a function."""

from __future__ import annotations

import uuid
from typing import Any

from server.tools.calls import Call

Json = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class TextItem:
    """A message with one part of text."""

    def __init__(self) -> None:
        self.id = new_id("msg")
        self.text = ""
        self.logprobs: list[Json] = []

    def add(self, text: str, logprobs: list[Json]) -> None:
        self.text += text
        self.logprobs += logprobs

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class CallItem:
    def __init__(self, call: Call) -> None:
        self.id = new_id("fc")
        self.call = call

    def json(self, status: str) -> Json:
        call = self.call
        said = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"id": self.id, "type": "function_call", "status": status, **said}
