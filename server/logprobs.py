"""Log probabilities in OpenAI's two spellings: four parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from server.choice import TokenEntry

if TYPE_CHECKING:
    from server.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in for it


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """`top_logprobs` always holds the chosen token too, so there may be one more than was asked for."""
    tops = []
    for entry in entries:
        top = {tokenizer.token_text(token_id): finite(value) for token_id, value in entry.logprobs.top}
        top.setdefault(tokenizer.token_text(entry.logprobs.token_id), finite(entry.logprobs.logprob))
        tops.append(top)
    return {
        "text_offset": [entry.text_offset for entry in entries],
        "tokens": [tokenizer.token_text(entry.logprobs.token_id) for entry in entries],
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
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
