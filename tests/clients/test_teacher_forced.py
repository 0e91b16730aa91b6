"""Echoed log-probabilities are those of transformers' forward pass over the same tokens, cold and warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from tests.server.real import RealServer

TEXTS = [
    "A short one.",
    "Long enough for several blocks: the tide comes in, the tide goes out, and the harbour master writes it down. " * 2,
    "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{GRINNING FACE}",
]


@pytest.mark.parametrize("text", TEXTS, ids=["short", "long", "characters of several tokens"])
def test_an_echo_scores_the_prompt_as_transformers_does(
    server: RealServer, checkpoint: tuple[Path, Any], tokenizer: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    with OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        for _ in ("cold", "warm"):
            answer = client.completions.create(
                model="tiny",
                prompt=text,
                echo=True,
                logprobs=3,
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            choice = answer.choices[0]
            assert choice.model_extra is not None and choice.logprobs is not None
            whole = [*ids, *choice.model_extra["token_ids"]]
            with torch.inference_mode():
                dense = checkpoint[1](torch.tensor([whole])).logits[0].log_softmax(-1)
            scores = choice.logprobs.token_logprobs
            assert scores is not None and len(scores) == len(whole) and scores[0] is None
            expected = [dense[place - 1, whole[place]].item() for place in range(1, len(whole))]
            assert scores[1:] == pytest.approx(expected, abs=1e-4)
            assert choice.text.startswith(text)
