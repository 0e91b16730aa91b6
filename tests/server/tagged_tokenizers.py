"""Tiny tokenizers that have one token for each tag of calls and of reasoning, in every way that files say so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken

from server.tokenizer import Tokenizer
from tests.server.tiny_tokenizers import byte_level, sentencepiece

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CONTROL = "<|other|>"  # a special token that is no tag
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
KINDS = ("text", "special", "sentencepiece text", "sentencepiece special", "USER_DEFINED", "CONTROL")


def tagged(kind: str) -> Any:
    """As transformers has it. `kind` is one of KINDS; the last two are what a GGUF file says of the tags."""
    made = copy.deepcopy(sentencepiece() if kind.startswith("sentencepiece") else byte_level())
    is_special = kind.endswith("special") or kind == "CONTROL"
    for text in TAGS:
        made.add_tokens([AddedToken(text, special=is_special, normalized=False)], special_tokens=is_special)
    made.add_tokens([AddedToken(CONTROL, special=True, normalized=False)], special_tokens=True)
    made.chat_template = TEMPLATE
    return made


def load_tagged(kind: str, folder: Path) -> Tokenizer:
    """As a server reads it from a file."""
    made = tagged(kind)
    if kind not in ("USER_DEFINED", "CONTROL"):
        made.save_pretrained(folder)
        return Tokenizer.load(str(folder))
    path = folder / "tokenizer.gguf"
    write_gguf(path, made, TokenType[kind])
    return Tokenizer.load(str(path))


def write_gguf(path: Path, tokenizer: Any, of_tags: TokenType) -> None:
    backend = tokenizer.backend_tokenizer
    tokens = [backend.id_to_token(token) for token in range(len(tokenizer))]
    kinds = dict.fromkeys(("<|begin|>", "<|end|>", CONTROL), TokenType.CONTROL) | dict.fromkeys(TAGS, of_tags)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
