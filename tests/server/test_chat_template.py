"""What templates take is found out: strings or parts, objects or text. As transformers spells it, where it can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.chat_template import ChatTemplate, Forms, TemplateFault, TemplateSource
from tests.server.tiny_tokenizers import byte_level

Json = dict[str, Any]

LOOP = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


def around(body: str) -> str:
    return "{% for message in messages %}<{{ message.role }}>" + body + "{% endfor %}"


STRINGS = {
    "plain": around("{{ message.content }}"),
    "trimmed": around("{{ message['content'] | trim }}"),
    "upper": around("{{ message.content.upper() }}"),
    "as json": around("{{ {'text': message.content} | tojson }}"),
    "guarded": around("{% if message.content is string %}{{ message.content }}{% endif %}"),
    "characters": around("{% for char in message.content %}{{ char }}{% endfor %}"),
    "quoted": around("'{{ message.content }}'"),
}
PARTS = {
    "loop": around(LOOP),
    "item access": around("{% for p in message['content'] %}{{ p['text'] }}{% endfor %}"),
    "renamed": around("{% set said = message.content %}{% for part in said %}{{ part.text }}{% endfor %}"),
    "first part": around("{{ message.content[0].text }}"),
    "first part's item": around("{{ message['content'][0]['text'] }}"),
    "filtered": around("{{ message.content | map(attribute='text') | join(' ') }}"),
    "selected": around("{% for p in message.content | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}"),
    "macro": "{% macro say(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
    + around("{{ say(message.content) }}"),
    "refuses strings": around("{% if message.content is string %}{{ raise_exception('parts!') }}{% endif %}" + LOOP),
}
BOTH = {
    "either": around("{% if message.content is string %}{{ message.content }}{% else %}" + LOOP + "{% endif %}"),
    "not a mapping": around(
        "{% if message.content is iterable and message.content is not string %}"
        + LOOP
        + "{% else %}{{ message.content }}{% endif %}"
    ),
}


def source(text: str) -> TemplateSource:
    return TemplateSource(text, None, {"bos_token": "<s>"}, ())


def spell(text: str, messages: list[Json], **variables: Any) -> str:
    template = ChatTemplate(source(text))
    return template.render(messages, variables, template.find_forms()).text


def of_transformers(text: str, messages: list[Json], **variables: Any) -> str:
    return str(byte_level().apply_chat_template(messages, chat_template=text, tokenize=False, **variables))


def parts(*texts: str) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


ROLES = ["system", "user", "assistant", "user"]


def conversation(content: Any) -> list[Json]:
    return [{"role": role, "content": content} for role in ROLES]


@pytest.mark.parametrize("text", [*STRINGS.values(), *PARTS.values(), *BOTH.values()], ids=[*STRINGS, *PARTS, *BOTH])
@pytest.mark.parametrize("content", ["Hello you", parts("Hello you")], ids=["string", "parts"])
def test_the_text_of_every_message_arrives(text: str, content: Any) -> None:
    spelled = spell(text, conversation(content))
    assert spelled.casefold().count("hello you") == 4
    assert "'type'" not in spelled and '"type"' not in spelled, "no list is printed as one"


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_a_template_of_parts_gets_parts(text: str) -> None:
    messages = conversation(parts("one", "two"))
    assert spell(text, messages) == of_transformers(text, messages)
    assert spell(text, conversation("one")) == of_transformers(text, conversation(parts("one")))


@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS)
def test_a_template_of_strings_gets_parts_as_lines(text: str) -> None:
    assert spell(text, conversation(parts("one", "two"))) == of_transformers(text, conversation("one\ntwo"))


@pytest.mark.parametrize("text", BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("content", ["one", parts("one", "two")], ids=["string", "parts"])
def test_a_template_of_both_gets_what_the_client_sent(text: str, content: Any) -> None:
    assert spell(text, conversation(content)) == of_transformers(text, conversation(content))


def test_roles_may_differ() -> None:
    text = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + LOOP
        + "{% else %}{{ message.content }}{% endif %}|{% endfor %}"
    )
    assert spell(text, conversation("said")) == "said|said|said|said|"
    assert spell(text, conversation(parts("a", "b"))) == "a\nb|ab|a\nb|ab|"


def test_tool_answers_have_a_form_too() -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content[0].text }}]"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "42"}]
    assert spell(text, messages) == "a[42]"


def test_a_template_with_rules_for_the_order_of_roles() -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        + LOOP
        + "{% endfor %}"
    )
    assert spell(strict, conversation("x")[1:2]) == "x"
    with pytest.raises(TemplateFault, match="does not accept these messages: no system"):
        spell(strict, conversation("x"))


# -- the arguments of calls

ARGUMENTS = {
    "object": "{{ call.function.arguments | tojson }}",
    "items": "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }};{% endfor %}",
    "text": "{{ call.function.arguments }}",
    "joined text": "{{ 'args: ' + call.function.arguments }}",
    "text's method": "{{ call.function.arguments.strip() }}",
    "either": "{% set given = call.function.arguments %}{{ given if given is string else given | tojson }}",
}


@pytest.mark.parametrize("written", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("arguments", [{"city": "Oslo's", "when": None, "n": [1.5, True]}, {}, {"é": '"'}])
def test_arguments_are_given_as_the_template_takes_them(written: str, arguments: Json) -> None:
    text = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        + written
        + "{% endfor %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": "?"}
    spelled = spell(text, [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, asked])
    if ".items()" in written:
        assert spelled.count("=") == len(arguments)
    else:
        assert json.loads(spelled.removeprefix("?").removesuffix("?").removeprefix("args: ")) == arguments


def test_the_other_form_is_tried_where_trying_it_out_did_not_tell() -> None:
    """This one wants text, and a tool of a certain name."""
    text = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.function.name == 'known' %}"
        "{{ '>' + call.function.arguments }}{% endif %}{% endfor %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "known", "arguments": {"a": 1}}}
    assert spell(text, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == '>{"a": 1}'


def test_the_first_error_is_told_where_both_forms_fail() -> None:
    text = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(TemplateFault, match="no tools here"):
        spell(text, [{"role": "assistant", "content": "", "tool_calls": [call]}])


# -- as transformers has it

EQUAL = {
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1, b='é') | tojson }}{{ dict.fromkeys(['a'], 1) | tojson }}",
    "tojson": "{{ messages | tojson(indent=2) }}{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tools": "{% if tools %}{{ tools | length }}{% endif %}{{ tools is none }}{{ documents is none }}",
    "variables": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}{{ extra }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("text", EQUAL.values(), ids=EQUAL)
def test_rendered_as_transformers_does(text: str) -> None:
    tokenizer = byte_level()
    made = TemplateSource(text, None, dict(tokenizer.special_tokens_map), ())
    messages = [{"role": "user", "content": " é\n"}, {"role": "assistant", "content": "b", "reasoning": "r"}] * 2
    variables = {"add_generation_prompt": True, "extra": [1, {"a": None}], "tools": [{"type": "function"}]}
    ours = ChatTemplate(made).render(messages, variables, Forms()).text
    assert ours == tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False, **variables)


said = st.text(st.sampled_from("ab \n<>é\"'{}"), max_size=12)


@settings(deadline=None, max_examples=60)
@given(contents=st.lists(said, min_size=1, max_size=4), text=st.sampled_from([*STRINGS.values(), *BOTH.values()]))
def test_any_contents_as_transformers_has_them(contents: list[str], text: str) -> None:
    messages = [{"role": role, "content": content} for role, content in zip(ROLES[1:] + ROLES, contents, strict=False)]
    assert spell(text, messages) == of_transformers(text, messages)


@settings(deadline=None, max_examples=60)
@given(text=st.sampled_from(["plain", "trimmed"]), content=said.filter(str.strip))
def test_a_message_left_open_is_as_transformers_has_it(text: str, content: str) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
    ours = spell(STRINGS[text], messages, continue_final_message=True)
    assert ours == of_transformers(STRINGS[text], messages, continue_final_message=True)


def test_the_last_of_several_parts_is_left_open() -> None:
    messages = [{"role": "assistant", "content": parts("a", "b")}]
    closed = around(LOOP + "</s>")
    assert spell(closed, messages, continue_final_message=True) == "<assistant>ab"
    assert spell(around("{{ message.content }}</s>"), messages, continue_final_message=True) == "<assistant>a\nb"
    with pytest.raises(TemplateFault, match="cannot be continued"):
        spell("{{ messages[0].content[:1] }}", messages, continue_final_message=True)


def test_another_template_for_requests_with_tools() -> None:
    template = ChatTemplate(TemplateSource("plain", "{{ tools | length }} tools", {}, ()))
    message = [{"role": "user", "content": "x"}]
    assert template.render(message, {}, Forms()).text == "plain"
    assert template.render(message, {"tools": [{}, {}]}, Forms()).text == "2 tools"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__init__ }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_nothing_but_the_template_is_reached(text: str) -> None:
    try:
        spelled = spell(text, [{"role": "user", "content": "x"}])
    except TemplateFault:
        return
    assert spelled == ""
