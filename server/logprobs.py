"""Log probabilities in OpenAI's two spellings: four parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.choice import TokenEntry
from server.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in for it


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """`top_logprobs` always holds the chosen token too, so there may be one more than was asked for."""
    tops = []
    for entry in entries:
        top: dict[str, float] = {}
        for token_id, value in (*entry.logprobs.top, (entry.logprobs.token_id, entry.logprobs.logprob)):
            top.setdefault(label(token_id, tokenizer), finite(value))
        tops.append(top)
    return {
        "text_offset": [entry.text_offset for entry in entries],
        "tokens": [label(entry.logprobs.token_id, tokenizer) for entry in entries],
        "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": tops,
    }


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for entry in entries:
        chosen = entry.logprobs
        described = describe(chosen.token_id, chosen.logprob, tokenizer)
        described["top_logprobs"] = [describe(token_id, value, tokenizer) for token_id, value in chosen.top]
        content.append(described)
    return {"content": content, "refusal": None}


def describe(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def label(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text, or OpenAI's `bytes:\\xe2\\x80` where it is part of a character: unlike U+FFFD, that tells two
    such tokens apart."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
