"""Ids of texts and chats over a corpus: those that transformers' own tokenizers give, however a model is published."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.text.encoding import EncodeJob
from server.tokenizer import Tokenizer as Ours
from tests.server.test_special_text import CHATML, TRIMMING
from tests.server.test_tokenizer import default_path, write_gguf
from tests.server.tiny_tokenizers import byte_level, sentencepiece

ROOT = Path(__file__).resolve().parent.parent.parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SHORT = [
    "",
    " ",
    "   leading, and trailing   ",
    "\n\n\t mixed \r\n white \u00a0\u2003space",
    "1234567890 3.14 1,000,000 ½ ٣",
    "I'll, they'RE, DON'T; she’s",
    "naïve café, e\u0301 is é, \u1100\u1161\u11a8 is 각, \u212a is K",
    "中文字符，日本語のテキスト、한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "กำลังทดสอบ हिन्दी में पाठ",
    "😀 👩‍👩‍👧 🇫🇷 👍🏽 \U0001f9d1\u200d\U0001f680",
    "\x00\x01\x7f\ufeff\u200b\ufffd",
    "x" * 300,
    'if (a<=b && c!=d) { return f"{a:>10}"; }  // ---->',
    "https://example.org/a?b=c&d=%20#e  <tag attr='v'/>",
]


@cache
def corpus() -> list[str]:
    """Prose, code and tables of this repository, line by line and whole, and what it does not have."""
    files = [ROOT / "README.md", ROOT / "docs" / "recovery.md", ROOT / "server" / "tokenizer.py"]
    whole = [file.read_text(encoding="utf-8") for file in files]
    return [*SHORT, *whole, *(line for text in whole for line in text.splitlines()[:50])]


def check_texts(ours: Ours, reference: Any) -> None:
    for text in corpus():
        for special in (True, False):
            assert ours.encode(text, special) == reference.encode(text, add_special_tokens=special), text
        assert ours.encode_job(EncodeJob(text, with_offsets=True)).ids == reference.encode(text)


def check_chats(ours: Ours, reference: Any) -> None:
    texts = corpus()
    for first in range(0, len(texts), 3):
        roles = ["user", "assistant", "user"]
        chat = [{"role": role, "content": text} for role, text in zip(roles, texts[first:], strict=False)]
        for generate in (True, False):
            expected = reference.apply_chat_template(chat, add_generation_prompt=generate, return_dict=False)
            assert ours.apply_chat_template(chat, add_generation_prompt=generate) == expected


def test_the_default_model() -> None:
    """Against SmolLM2's tokenizer as it is published for transformers, rebuilt from the vocabulary and the merges."""
    fields = GGUFReader(default_path()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:17]])
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=tokens[1], eos_token=tokens[2])
    reference.chat_template = fields["tokenizer.chat_template"].contents()
    ours = Ours.load(str(default_path()))
    check_texts(ours, reference)
    check_chats(ours, reference)
    for text in corpus():
        lossless = not any(char in text for char in "\x00\x01\x7f")  # some control characters have no token
        assert not lossless or ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("template", [CHATML, TRIMMING], ids=["chatml", "trimming"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_hugging_face_directory(make: Any, template: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    ours = Ours.load(str(tmp_path))
    check_texts(ours, reference)
    check_chats(ours, reference)
    for text in corpus():
        assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text), skip_special_tokens=True)


def test_sentencepiece_with_byte_fallback_from_gguf(tmp_path: Path) -> None:
    saved = sentencepiece()
    tokens = sorted(saved.get_vocab(), key=saved.get_vocab().get)
    kinds = {0: TokenType.UNKNOWN, 1: TokenType.CONTROL, 2: TokenType.CONTROL}
    vocabulary = [(t, kinds.get(i, TokenType.BYTE if i < 259 else TokenType.NORMAL)) for i, t in enumerate(tokens)]
    check_texts(Ours.load(str(write_gguf(tmp_path / "m.gguf", "llama", vocabulary))), saved)


@cache
def published(split: str) -> Any:
    """A byte-level tokenizer as models of this family publish it for transformers, with a vocabulary of its own."""
    pattern = {"llama-bpe": LLAMA3, "qwen2": QWEN2}[split]
    backend = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), learned)
    if split == "llama-bpe":  # a word that no merges make
        state = json.loads(backend.to_str())
        state["model"]["vocab"]["Ġtrailing"] = len(state["model"]["vocab"])
        backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    begin = backend.token_to_id("<|begin|>")
    if split == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", begin)])
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2"])
def test_byte_level_from_gguf(split: str, tmp_path: Path) -> None:
    saved = published(split)
    vocab = saved.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    special = set(saved.all_special_tokens) | {"<|im_start|>"}
    merges = json.loads(saved.backend_tokenizer.to_str())["model"]["merges"]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocab["<|begin|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = Ours.load(str(tmp_path / "m.gguf"))
    check_texts(ours, saved)
    check_chats(ours, saved)
    assert (ours.encode("trailing")[0] == vocab["<|begin|>"]) is (split == "llama-bpe")
