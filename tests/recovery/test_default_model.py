"""The default model in float32 says what transformers says, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.load import LoadedModel, load_model
from model.source import resolve
from server.tokenizer import Tokenizer
from tests.recovery.harness import Watched, make_engine

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "List three uses of a brick.",
    "How many legs does a spider have, and why?",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve(None), dtype=torch.float32, device=torch.device("cpu"), progress=False)


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> LlamaForCausalLM:
    """transformers' network with the weights of the file."""
    config = loaded.config
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    missing, unexpected = network.load_state_dict(loaded.weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    network.tie_weights()
    return network


def test_64_greedy_tokens_of_five_prompts(reference: LlamaForCausalLM) -> None:
    """Each of our tokens is the most likely one of transformers after the same text, so its own greedy generation is
    ours. The five are generated together, and once more from the cache."""
    path = resolve(None).path
    tokenizer = Tokenizer.load(str(path))
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    world = Watched(make_engine(Path(path), num_blocks=200, max_model_len=2048, threads=2))
    names = [world.submit(prompt, 64) for prompt in prompts]
    world.run()
    for prompt, name in zip(prompts, names, strict=True):
        tokens = world.tokens(name)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
    assert world.complete(prompts[0], 64) == world.tokens(names[0])
    assert world.steps[0] == [len(prompts[0]) - 1]
