"""Tiny tokenizers of the two kinds that the Llama family uses, made here so that tests need no download."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from scheduler.vocabulary import Vocabulary
from server.structured.tags import WrittenTags
from server.tokenizer import Tokenizer as ServerTokenizer
from server.tools.hermes import Hermes

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the capital of France is Paris.",
    "Hello world! Hello there, how are you? I am fine, thank you.",
    "été à la plage; el niño; 中文 字符; 12 34 567",
]


@cache
def byte_level() -> Any:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM2 have it: tokens are runs of bytes, broken anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>")
    wrapped.add_tokens([AddedToken("<think>", special=False), AddedToken("｜tool｜", special=False)])
    return wrapped


@cache
def sentencepiece() -> Any:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it: words begin with U+2581."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        [TEXT[0], TEXT[1]] * 4, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token, _ in learned if token not in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = sorted((t for t in vocab if len(t) > 1 and not t.startswith("<")), key=lambda t: vocab[t])
    merges = [(t[:cut], t[cut:]) for t in ranked for cut in range(1, len(t)) if t[:cut] in vocab and t[cut:] in vocab]
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)


def vocabulary(tokenizer: Any) -> Vocabulary:
    """This tokenizer as a server passes it to its engine."""
    made = ServerTokenizer(tokenizer)
    return WrittenTags.of(made, Hermes()).vocabulary(made)
