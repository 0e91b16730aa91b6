"""Choosing the next token of each row from its logits.

    logits -> mask, allowed, bad words, bans -> bias -> penalties -> temperature -> min_p -> top_k -> top_p -> draw
              '------------------ adjust.py ---------------------'    '--------------- draw.py ---------------'

in the order and with the meaning that vLLM gives them. Reported log-probabilities (`logprobs.py`) are those of the raw
logits. A row's token depends on its own logits, parameters and history: noise is a hash of (seed, choice, position), so
the same seed gives the same text in any batch, after a preemption and in another process.

All of it runs on the host, in numpy but for the exponential: an argmax over 16 rows of 49,152 takes 0.09 ms there.
"""

from model.sampler.history import History
from model.sampler.params import SamplingLike
from model.sampler.rows import SampledToken, SampleRow, SamplingFailure, TokenMask
from model.sampler.sampler import Sampler

__all__ = ["History", "SampleRow", "SampledToken", "Sampler", "SamplingFailure", "SamplingLike", "TokenMask"]
