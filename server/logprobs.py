"""Log probabilities in OpenAI's two spellings: four parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.messages import TokenLogprobs
from server.choice import TokenEntry
from server.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in for it


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, *, as_ids: bool = False) -> dict[str, Any]:
    """`top_logprobs` always holds the chosen token too, so there may be one more than was asked for. `as_ids` has
    tokens spelled `token_id:N`, which no two tokens share."""
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        chosen = entry.logprobs
        if chosen is None:
            values.append(None)
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, value in (*chosen.top, (chosen.token_id, chosen.logprob)):
            top.setdefault(label(token_id, tokenizer, as_ids), finite(value))
        values.append(finite(chosen.logprob))
        tops.append(top)
    return {
        "text_offset": [entry.text_offset for entry in entries],
        "tokens": [label(entry.token_id, tokenizer, as_ids) for entry in entries],
        "token_logprobs": values,
        "top_logprobs": tops,
    }


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, *, as_ids: bool = False) -> dict[str, Any]:
    content = []
    for entry in entries:
        chosen = entry.logprobs
        if chosen is None:
            continue  # the first of a prompt, which a chat does not repeat
        described = describe(chosen.token_id, chosen.logprob, tokenizer, as_ids)
        described["top_logprobs"] = [describe(token_id, value, tokenizer, as_ids) for token_id, value in chosen.top]
        content.append(described)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    scored: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's spelling: for each token of the prompt its own log probability and those of the `most` likeliest tokens
    there, by token id; null for the first."""
    return [None if each is None else by_token_id(each, tokenizer, most) for each in scored]


def by_token_id(scored: TokenLogprobs, tokenizer: Tokenizer, most: int) -> dict[str, dict[str, Any]]:
    top = enumerate(scored.top[:most], start=1)
    others = [(token_id, value, rank) for rank, (token_id, value) in top if token_id != scored.token_id]
    return {
        str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, value, rank in ((scored.token_id, scored.logprob, scored.rank), *others)
    }


def describe(token_id: int, logprob: float, tokenizer: Tokenizer, as_id: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def label(token_id: int, tokenizer: Tokenizer, as_id: bool) -> str:
    """The token's text, or OpenAI's `bytes:\\xe2\\x80` where it is part of a character: unlike U+FFFD, that tells two
    such tokens apart."""
    if as_id:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
