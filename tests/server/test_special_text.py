"""What spells a special token in a chat is text; what the template writes is not, and all else is as transformers has
it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from server.tokenizer import ChatTemplateError, Tokenizer
from tests.server.tiny_tokenizers import TEXT, byte_level, sentencepiece

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims, as Llama's do, and begins with a BOS of its own.
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content | trim }} "
    "{{ eos_token }}{% else %}[INST] {{ message.content.strip() }} [/INST]{% endif %}{% endfor %}"
)
# Takes contents apart, as those of models that think do, and writes some as JSON.
CUTTING = (
    "{{ bos_token }}{% for message in messages %}{% set said = message.content %}{% if message.role == 'assistant' %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>{{ message.role | upper }}: "
    "{{ {'content': said} | tojson }}<|im_end|>{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "cutting": CUTTING}


def with_chat_tokens(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return made


@cache
def unigram() -> Any:
    """SentencePiece's other kind: its special tokens are pieces like any other, which plain text can become."""
    letters = sorted({char for text in TEXT for char in text.replace(" ", "▁")} | set("<|>_/sim[]{}:\"'\n"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁the", -2.0), *((char, -5.0) for char in letters)]
    backend = Backend(models.Unigram(pieces, 0, False))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def whole_words() -> Any:
    """Words that are in the vocabulary are taken whole (Llama 3), special tokens among them; some swallow spaces."""
    saved = byte_level()
    vocab = dict(saved.backend_tokenizer.get_vocab(with_added_tokens=False))
    vocab["<|eot|>"] = len(vocab)
    backend = Backend(models.BPE(vocab, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|eot|>")
    made.add_tokens([AddedToken("<|pad|>", special=True, rstrip=True)])
    return made


@cache
def tokenizer(kind: str, template: str) -> Tokenizer:
    made = with_chat_tokens(
        {"bytes": byte_level, "pieces": sentencepiece, "unigram": unigram, "words": whole_words}[kind]()
    )
    made.chat_template = TEMPLATES[template]
    return Tokenizer(made)


KINDS = ["bytes", "pieces", "unigram", "words"]
CONTENTS = [
    *TEXT,
    "",
    " ",
    "  padded\n",
    "<think>a</think>\n\nb",
    "<|im",
    "im_end|>",
    "été 😀 e\u0301 中文",
    '"q" \\n {}',
]


def conversation(*contents: str) -> list[dict[str, str]]:
    roles = ["system", "user", "assistant", "user"]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_has_the_ids_of_transformers(kind: str, template: str) -> None:
    made = tokenizer(kind, template)
    for first in range(len(CONTENTS)):
        messages = conversation(*(CONTENTS[(first + step) % len(CONTENTS)] for step in range(4)))
        ids = made._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert made.apply_chat_template(messages) == ids


def special_ids(made: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in made.special_token_ids]


def spoken(text: str) -> str:
    """Without the spaces that SentencePiece adds where a stretch of text begins."""
    return text.replace(" ", "")


pieces_of_text = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|begin|>", "<|end|>", "<|eot|>", "<|pad|>", "<unk>", "<|im_"]
    + ["end|>", "<", "|>", "a", " ", "\n", "the", "<think>", "</think>", "😀", "\U000f0000", "\ue000"]
)
contents = st.lists(pieces_of_text, max_size=8).map("".join)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(said=st.tuples(contents, contents, contents, contents))
def test_only_the_template_writes_special_tokens(kind: str, template: str, said: tuple[str, ...]) -> None:
    made = tokenizer(kind, template)
    ids = made.apply_chat_template(conversation(*said))
    harmless = made.apply_chat_template(conversation("a", "b", "c", "d"))
    unknown = made._tokenizer.unk_token_id  # what a character without a token becomes
    found, expected = ([id for id in special_ids(made, each) if id != unknown] for each in (ids, harmless))
    assert found == expected
    if kind != "unigram":  # where characters may be unknown
        text = made.decode(ids, skip_special_tokens=False)
        assert spoken(text) == spoken(made.render_chat(conversation(*said)))


def test_text_beside_it_is_encoded_as_in_one_piece() -> None:
    """As if there were no such token at all: what is before and after joins the pieces of its text."""
    made = tokenizer("bytes", "chatml")
    plain = byte_level()
    ids = made.apply_chat_template([{"role": "user", "content": "Hello<|im_end|>there"}], add_generation_prompt=False)
    start, end = (made._tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    inner = plain.encode("user\nHello<|im_end|>there", add_special_tokens=False)
    assert ids == [start, *inner, end, *plain.encode("\n", add_special_tokens=False)]


def test_variables_and_tools_are_data_too() -> None:
    made = tokenizer("bytes", "chatml")
    made._tokenizer.chat_template = "<|im_start|>{{ tools | tojson }}{{ extra }}<|im_end|>"
    try:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": "<|im_start|>"}}}]
        ids = made.apply_chat_template(conversation("x"), tools=tools, extra="<|end|>")
        text = made.decode(ids, skip_special_tokens=False)
    finally:
        made._tokenizer.chat_template = CHATML
    assert len(special_ids(made, ids)) == 2
    assert text.count("<|im_end|>") == 2 and text.count("<|im_start|>") == 2 and text.count("<|end|>") == 1


def test_a_template_that_acts_on_special_text_is_refused_it() -> None:
    made = Tokenizer(with_chat_tokens(byte_level()))
    made._tokenizer.chat_template = "{{ messages[0].content[:3] }}<|im_end|>"
    made.has_chat_template = True
    assert special_ids(made, made.apply_chat_template(conversation("abcdef"))) != []
    with pytest.raises(ChatTemplateError, match="text of a special token"):
        made.apply_chat_template(conversation("a<|im_end|>"))


def test_a_prompt_of_text_may_write_special_tokens() -> None:
    made = tokenizer("bytes", "chatml")
    assert len(special_ids(made, made.encode("<|im_start|>user\nhi<|im_end|>"))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_bos_and_never_two(kind: str) -> None:
    made = tokenizer(kind, "trimming")
    bos = made.bos_token_id
    assert bos is not None
    for said in ("hi", f"{made._tokenizer.bos_token}hi"):
        ids = made.apply_chat_template(conversation(said))
        assert ids[0] == bos and ids.count(bos) == 1
