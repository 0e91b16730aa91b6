"""Chat templates: Jinja programs that come with a model and spell a conversation as one text.

They are compiled and rendered as transformers does it (`apply_chat_template`): the same sandbox, filters and functions,
and the same rule for a final message that is left open. What differs between templates is found by trying: whether one
takes the content of a message as a string or as a list of parts, and the arguments of a call as an object or as text.

    TemplateFault           the template does not compile, or does not accept these messages

This module imports jinja2 and nothing larger, since a process of its own runs it (server/text/worker.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from server.special_text import SpecialMarks, unused_mark

Json = dict[str, Any]

# What a template raises by itself, or does when it is given what it does not expect.
TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
LEFT_OPEN = "END_OF_TEXT_TO_CONTINUE "  # with a space, to see whether the template trims
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that templates and clients have for one thing
NO_TEMPLATE = "This model has no chat template; use /v1/completions."
PROBE = "Xq7Zprobe"


class TemplateFault(Exception):
    """The message is for the client, and says what the template said."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """All that rendering takes, as plain data. `with_tools` is another template for requests with tools;
    `variables` are the tokenizer's, such as bos_token; `special_texts` spell its special tokens."""

    text: str
    with_tools: str | None
    variables: Json
    special_texts: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, special_texts: Sequence[str]) -> TemplateSource | None:
        """That of a tokenizer of transformers; None where it has no template."""
        templates = tokenizer.chat_template
        with_tools = None
        if isinstance(templates, dict):
            with_tools = templates.get("tool_use")
            templates = templates.get("default", with_tools)
        if not templates:
            return None
        return cls(templates, with_tools, dict(tokenizer.special_tokens_map), tuple(special_texts))


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template takes: the content of which roles as a list of parts (`parts`), or as nothing but such a list
    (`only_parts`), and the arguments of calls as text rather than as an object."""

    parts: Sequence[str] = ()
    only_parts: Sequence[str] = ()
    text_arguments: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text. Where it spells special tokens that the template did not write, `mark` stands before each
    of them."""

    text: str
    mark: str | None = None


class ChatTemplate:
    def __init__(self, source: TemplateSource) -> None:
        """Raises TemplateFault where the template does not compile."""
        self._source = source
        environment = make_environment()
        try:
            self._plain = environment.from_string(source.text)
            self._with_tools = environment.from_string(source.with_tools) if source.with_tools else self._plain
        except TemplateSyntaxError as error:
            raise TemplateFault(f"line {error.lineno}: {error.message}") from None
        except TEMPLATE_FAULTS as error:
            raise TemplateFault(str(error) or type(error).__name__) from None
        self._marks = SpecialMarks(source.special_texts)

    def render(self, messages: Sequence[Json], variables: Json, forms: Forms) -> Rendered:
        """`variables` are the template's, and `tools`, `add_generation_prompt` and `continue_final_message`.

        Raises TemplateFault.
        """
        conversation = in_forms(messages, forms)
        try:
            text = self._spell(conversation, variables)
        except TEMPLATE_FAULTS as error:
            conversation = in_forms(messages, replace(forms, text_arguments=not forms.text_arguments))
            text = self._spell_otherwise(conversation, variables, error)
        if not self._marks.occur_in(conversation, variables):
            return Rendered(text)
        mark = unused_mark(conversation, variables, text)
        try:
            marked = self._spell(self._marks.mark(conversation, mark), self._marks.mark(variables, mark))
        except TEMPLATE_FAULTS as error:
            raise TemplateFault(refusal(error)) from None
        if marked.replace(mark, "") != text:
            raise TemplateFault("The model's chat template cannot take the text of a special token as it is.")
        return Rendered(marked, mark)

    def _spell_otherwise(self, conversation: Sequence[Json], variables: Json, error: Exception) -> str:
        """With the arguments of calls in their other form. Where there are none, or that fails too, the first error
        stands."""
        if any(message.get("tool_calls") for message in conversation):
            try:
                return self._spell(conversation, variables)
            except TEMPLATE_FAULTS:
                pass
        raise TemplateFault(refusal(error)) from None

    def _spell(self, messages: Sequence[Json], variables: Json) -> str:
        given = {**self._source.variables, "tools": None, "documents": None, **variables}
        template = self._plain if given["tools"] is None else self._with_tools
        conversation = [with_reasoning(message) for message in messages]
        if not given.pop("continue_final_message", False):
            return template.render(messages=conversation, **given)
        source = self._source.text if template is self._plain else self._source.with_tools
        if "content" not in str(source):
            raise ValueError("it does not read the content of the message to continue")
        said = open_end(conversation)
        return cut_open(template.render(messages=conversation, **given), said)

    def find_forms(self) -> Forms:
        """By rendering short conversations in each form. Only what a template does not accept as it is usual (a
        string, an object) is given in the other form."""
        forms = Forms()
        for role in ("user", "system", "assistant", "tool"):
            with_parts = replace(forms, parts=(*forms.parts, role))
            if not shows_probe(self._probe(probe_messages(role, [{"type": "text", "text": PROBE}]), with_parts)):
                continue
            if shows_probe(self._probe(probe_messages(role, PROBE), forms)):
                forms = with_parts
            else:
                forms = replace(with_parts, only_parts=(*forms.only_parts, role))
        return replace(forms, text_arguments=self._wants_text_arguments(forms))

    def _wants_text_arguments(self, forms: Forms) -> bool:
        calls = probe_messages("tool", "x")
        as_object = self._probe(calls, forms)
        if as_object is not None and f"{{'{PROBE}'" not in as_object:  # as Python prints a dict
            return False
        as_text = self._probe(calls, replace(forms, text_arguments=True))
        return as_text is not None and PROBE in as_text

    def _probe(self, messages: Sequence[Json], forms: Forms) -> str | None:
        try:
            return self._spell(in_forms(messages, forms), {"add_generation_prompt": True})
        except TEMPLATE_FAULTS:
            return None


def refusal(error: Exception) -> str:
    return f"The model's chat template does not accept these messages: {error}"


# -- what a template is given


def in_forms(messages: Sequence[Json], forms: Forms) -> list[Json]:
    """The messages with contents and arguments as the template takes them. A role that takes parts as well as strings
    gets what the client sent."""
    return [in_form(message, forms) for message in messages]


def in_form(message: Json, forms: Forms) -> Json:
    made = {name: value for name, value in message.items() if value is not None}
    content = made.get("content")
    if isinstance(content, list) and made.get("role") not in forms.parts:
        made["content"] = joined(content)
    elif isinstance(content, list):
        made["content"] = [dict(part) for part in content]
    elif isinstance(content, str) and made.get("role") in forms.only_parts:
        made["content"] = [{"type": "text", "text": content}]
    if forms.text_arguments and isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [with_text_arguments(call) for call in made["tool_calls"]]
    return made


def joined(content: str | Sequence[Json]) -> str:
    """Parts as one string, a line each, for what takes no parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def with_text_arguments(call: Json) -> Json:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def with_reasoning(message: Json) -> Json:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


# -- a final message that is left open


def open_end(conversation: list[Json]) -> str:
    """Mark where the last message ends; returns its text. Raises ValueError."""
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1] = {**conversation[-1], "content": content + LEFT_OPEN}
        return content
    parts: list[Json] = content or []
    for index in reversed(range(len(parts))):
        part = parts[index]
        if "text" in part:
            opened = [*parts[:index], {**part, "text": part["text"] + LEFT_OPEN}, *parts[index + 1 :]]
            conversation[-1] = {**conversation[-1], "content": opened}
            return str(part["text"])
    raise ValueError("the last message has no text to continue")


def cut_open(text: str, said: str) -> str:
    """The text up to where its last message ends. Raises ValueError."""
    end = text.rfind(LEFT_OPEN.strip())
    if end < 0 or said.strip() not in text:
        raise ValueError("the template does not repeat the last message as it is, so it cannot be continued")
    return text[:end] if text.startswith(LEFT_OPEN, end) else text[:end].rstrip()


# -- finding what a template takes


def probe_messages(role: str, content: Any) -> list[Json]:
    """A conversation in the usual order of roles in which a message of this one has this content."""
    asked, probed = {"role": "user", "content": "x"}, {"role": role, "content": content}
    if role == "user":
        return [probed]
    if role == "system":
        return [probed, asked]
    if role == "assistant":
        return [asked, probed, asked]
    function = {"name": "f", "arguments": {PROBE: "x"}}
    call = {"id": "call00001", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [asked, called, {**probed, "tool_call_id": "call00001", "name": "f"}]


AS_DATA = re.compile(rf"""text\\*['"]\s*:\s*\\*['"]{PROBE}""", re.IGNORECASE)  # a part printed as Python or JSON has it


def shows_probe(text: str | None) -> bool:
    """Whether the content was written as text, rather than not at all or as the list it is in."""
    if text is None:
        return False
    arguments = len(re.findall(rf"""\\*['"]{PROBE}\\*['"]\s*:""", text, re.IGNORECASE))
    return text.casefold().count(PROBE.casefold()) - arguments > len(AS_DATA.findall(text))


# -- the environment that transformers' templates are written for


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment


class GenerationBlocks(Extension):
    """`{% generation %}` marks what an assistant said, for training. Here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class PlainDict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(Namespace):
    """A namespace that stores nothing under names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        made = dict(*args[1:], **kwargs)
        for name in made:
            refuse_private(name)
        Namespace.__init__(args[0], made)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        Namespace.__setitem__(self, name, value)


def refuse_private(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot store {name!r}: the name begins with an underscore")
