"""From the sampling fields of a body to what the engine samples by."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from scheduler.messages import EngineInfo, SamplingParams
from scheduler.sampling_defaults import SamplingDefaults
from server.errors import BadRequest, shorten
from server.prompt import check_ids
from server.protocol import GenerationBody

GREEDY_BELOW = 1e-5  # a temperature that small is greedy in all but rounding, and would overflow the logits
SEED_MASK = 2**63 - 1


def sampling_params(
    body: GenerationBody, max_tokens: int, info: EngineInfo, bad_words: Sequence[tuple[int, ...]] = ()
) -> SamplingParams:
    """`bad_words` are those of the body as token ids.

    Raises BadRequest where a token id is unknown, or where the context leaves less than `min_tokens`.
    """
    check_ids(body.stop_token_ids, info.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    if body.min_tokens > max_tokens:
        message = f"Invalid 'min_tokens': {body.min_tokens} is above the {max_tokens} tokens that may be generated."
        raise BadRequest(message, param="min_tokens", code="invalid_value")
    refuse_nothing_to_say(body, bad_words, info)
    chosen = with_defaults(body, info.sampling)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=(secrets.randbits(63) if body.seed is None else body.seed) & SEED_MASK,
        temperature=0.0 if chosen.temperature < GREEDY_BELOW else chosen.temperature,
        top_p=chosen.top_p,
        top_k=max(chosen.top_k, 0),
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logprobs=body.logprobs_wanted,
        prompt_logprobs=body.prompt_logprobs_wanted,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logit_bias=biases(body.logit_bias, info.vocab_size),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        bad_words=tuple(bad_words),
    )


def with_defaults(body: object, defaults: SamplingDefaults) -> SamplingDefaults:
    """The values that are used: the body's own, and `defaults` for those it leaves out or has no field for."""
    own = {field.name: getattr(body, field.name, None) for field in fields(defaults)}
    return replace(defaults, **{name: value for name, value in own.items() if value is not None})


def refuse_nothing_to_say(body: GenerationBody, bad_words: Sequence[tuple[int, ...]], info: EngineInfo) -> None:
    """Where every allowed token is forbidden from the start."""
    if body.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in bad_words if len(word) == 1}
    if body.min_tokens > 0:
        forbidden.update(body.stop_token_ids, () if body.ignore_eos else info.eos_token_ids)
    if forbidden.issuperset(body.allowed_token_ids):
        message = "Invalid 'allowed_token_ids': none of them may be chosen, by bad_words or min_tokens."
        raise BadRequest(message, param="allowed_token_ids", code="invalid_value")


def biases(by_token: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's map of token ids, which JSON makes strings of, to what is added to their logits. Raises BadRequest."""
    bad = [key for key in by_token if not is_token_id(key, vocab_size)]
    if bad:
        param = shorten(f"logit_bias.{bad[0]}", 100) if len(bad) == 1 else "logit_bias"
        named = shorten(", ".join(repr(shorten(key, 40)) for key in bad), 1000)
        message = f"Invalid {param!r}: a key is a token id below {vocab_size}, in digits, which {named} is not."
        raise BadRequest(message, param=param, code="invalid_token_id")
    return tuple((int(key), bias) for key, bias in by_token.items())


def is_token_id(key: str, vocab_size: int) -> bool:
    return key.isascii() and key.isdecimal() and key == str(int(key[:20])) and int(key) < vocab_size
