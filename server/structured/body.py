"""The fields of a request that say what its text must match, and the grammar they make."""

from __future__ import annotations

from typing import Any, Literal, Self

import orjson
from pydantic import ConfigDict, Field, field_validator, model_validator

from scheduler.messages import Grammar, GrammarKind
from server.errors import BadRequest
from server.json_depth import TOO_DEEP, is_too_deep
from server.strict import StrictModel, lacking, misplaced

MAX_TEXT = 128 * 1024  # characters of a schema or a grammar; what bounds the time of compiling it
MAX_CHOICES = 1024

Json = dict[str, Any]


class JsonSchema(StrictModel):
    """OpenAI's. `strict` is taken: a schema is always held to. `description` is told to no model, as nobody does."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Json | bool = Field(alias="schema")
    strict: bool = False


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise lacking("json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise misplaced("json_schema", f"it does not go with type {self.type!r}")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's: exactly one of the four. `json` is a schema, or the text of one."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_: Json | bool | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_TEXT)

    @field_validator("json_", mode="before")
    @classmethod
    def check_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"not the text of a JSON schema: {error}") from None
            if is_too_deep(value):
                raise ValueError(TOO_DEEP)
            if not isinstance(value, dict | bool):
                raise ValueError("a JSON schema is an object")
        return value

    @model_validator(mode="after")
    def check_one(self) -> Self:
        given = [name for name in ("json", "regex", "choice", "grammar") if self.of(name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of json, regex, choice and grammar is wanted, not {len(given)}")
        return self

    def of(self, name: str) -> Any:
        return self.json_ if name == "json" else getattr(self, name)


def grammar_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> tuple[Grammar, str] | None:
    """What the text must match and the path of the field that says so; None for any text. Raises BadRequest."""
    if outputs is not None:
        return outputs_grammar(outputs)
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return schema_grammar({"type": "object"}, "response_format")
    return schema_grammar(response_format.json_schema.schema_, "response_format.json_schema.schema")


def outputs_grammar(outputs: StructuredOutputs) -> tuple[Grammar, str]:
    if outputs.json_ is not None:
        return schema_grammar(outputs.json_, "structured_outputs.json")
    if outputs.regex is not None:
        return Grammar(GrammarKind.REGEX, outputs.regex), "structured_outputs.regex"
    if outputs.choice is not None:
        text = orjson.dumps(outputs.choice).decode()
        refuse_long(text, "structured_outputs.choice")
        return Grammar(GrammarKind.CHOICE, text), "structured_outputs.choice"
    return Grammar(GrammarKind.GRAMMAR, outputs.grammar or ""), "structured_outputs.grammar"


def schema_grammar(schema: Json | bool, param: str) -> tuple[Grammar, str]:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, param)), param


def schema_text(schema: Json | bool, param: str) -> str:
    """A schema as text. Raises BadRequest for one too deep or too large to be held to, and for the keyword by which
    llguidance is told to hold to less."""
    if schema is False:
        raise BadRequest(f"Invalid {param!r}: no text matches it.", param=param, code="invalid_value")
    if isinstance(schema, dict) and "x-guidance" in schema:
        message = f"Invalid {param!r}: the keyword 'x-guidance' is not supported."
        raise BadRequest(message, param=param, code="invalid_value")
    try:
        text = orjson.dumps({} if schema is True else schema).decode()
    except TypeError:
        message = f"Invalid {param!r}: the schema is nested too deep."
        raise BadRequest(message, param=param, code="invalid_value") from None
    refuse_long(text, param)
    return text


def refuse_long(text: str, param: str) -> None:
    if len(text) > MAX_TEXT:
        message = f"Invalid {param!r}: {len(text)} characters, and {MAX_TEXT} are the most."
        raise BadRequest(message, param=param, code="invalid_value")
