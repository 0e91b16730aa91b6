"""What is a token's text, and how a forced text is spelled: by hypothesis, over every kind of tokenizer."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from scheduler.guided import Guides
from scheduler.messages import Grammar, GrammarKind
from scheduler.vocabulary import Speller, Vocabulary
from tests.server.tagged_tokenizers import CONTROL, KINDS, TAGS, tagged
from tests.server.tiny_tokenizers import byte_level, sentencepiece, vocabulary


def composing() -> Any:
    """Composes characters first, as Qwen's: a text with `e` and an accent is not what it encodes."""
    made = copy.deepcopy(byte_level())
    made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


def metaspace() -> Any:
    """Puts a space before a text by its pre-tokenizer, as newer SentencePiece files do."""
    made = copy.deepcopy(sentencepiece())
    made.backend_tokenizer.normalizer = None
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return made


TOKENIZERS = {kind: lambda kind=kind: tagged(kind) for kind in KINDS[:4]} | {
    "composing": composing,
    "metaspace": metaspace,
}


class World:
    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self.vocabulary = vocabulary(tokenizer)
        self.eos = tokenizer.eos_token_id
        self.guides = Guides(vocab_size or len(tokenizer), (self.eos,))
        self.guides.set_vocabulary(self.vocabulary).result()

    def spell(self, grammar: Grammar, choose: Any) -> bytes:
        """The text of a walk through the grammar's masks; `choose` picks among the tokens that one allows."""
        guide, seen, text = self.guides.open(grammar), list[int](), b""
        while self.eos not in seen:
            made = self.guides.start([("r", guide, seen)]).collect()
            assert not made.faults, made.faults
            mask = made.masks["r"]
            allowed = [token for token in range(len(mask) * 32) if mask[token // 32] >> token % 32 & 1]
            seen = [choose(allowed)]
            if seen[0] != self.eos:
                assert seen[0] not in self.vocabulary.special
                text += self.vocabulary.tokens[seen[0]]
        return text


@cache
def world(name: str) -> World:
    return World(TOKENIZERS[name]())


PIECES = (
    *TAGS,
    CONTROL,
    "<|end|>",
    "</s>",
    "<s>",
    "<",
    "e\u0301",
    "é",
    " ",
    "\u2581",
    "中",
    "\U0001f600",
    "the quick",
    "<0x41>",
)
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3, unique=True), data=st.data())
def test_any_text_can_be_demanded(name: str, texts: list[str], data: st.DataObject) -> None:
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(texts))
    spelled = world(name).spell(grammar, lambda allowed: data.draw(st.sampled_from(allowed)))
    assert spelled.decode() in texts


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_forced_text_is_spelled_as_the_model_was_taught(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    speller = Speller(vocabulary(tokenizer), len(tokenizer), (tokenizer.eos_token_id,))
    taught = tokenizer.backend_tokenizer.encode("the quick brown fox", add_special_tokens=False).ids
    assert (
        speller(" the quick brown fox" if "sentencepiece" in name or name == "metaspace" else "the quick brown fox")
        == taught
    )


def test_rows_of_the_embedding_beyond_the_tokens_and_tokens_beyond_the_rows() -> None:
    tokenizer = tagged("text")
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(["a<think>b"]))
    for vocab_size in (len(tokenizer) + 70, len(tokenizer) - 3):
        assert World(tokenizer, vocab_size).spell(grammar, lambda allowed: allowed[-1]) == b"a<think>b"


def test_an_end_of_sequence_that_the_tokenizer_calls_text_is_none() -> None:
    tokenizer = tagged("text")
    made = vocabulary(tokenizer)
    guides = Guides(len(tokenizer), (tokenizer.convert_tokens_to_ids("<think>"),))
    guides.set_vocabulary(Vocabulary(made.tokens, made.special, made.tokenizer)).result()
    guide = guides.open(Grammar(GrammarKind.CHOICE, '["<think>"]'))
    mask = guides.start([("r", guide, ())]).collect().masks["r"]
    token = tokenizer.convert_tokens_to_ids("<think>")
    assert not mask[token // 32] >> token % 32 & 1
    guides.close()
