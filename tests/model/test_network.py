"""The network against transformers: logits within 1e-4 in float32, for every family."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model.network import Network
from model.tensors import expected_tensors
from tests.model.paged import CPU, PagedWorld, Span, config_of, dense, make_network, random_tokens
from tests.model.tiny import ARCHITECTURES, VOCAB_SIZE, build_tiny

TOLERANCE = 1e-4


def _reference(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(architecture: str) -> None:
    tokens = random_tokens(random.Random(1), 300, VOCAB_SIZE)
    expected = _reference(build_tiny(architecture), tokens)
    logits = dense(make_network(architecture), tokens)
    assert expected.std() > 0.3  # else the tolerance would say little
    assert torch.allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_by_chunks_beside_others(architecture: str) -> None:
    rng = random.Random(2)
    prompts = [random_tokens(rng, length, VOCAB_SIZE) for length in (150, 40)]
    model = build_tiny(architecture)
    world = PagedWorld(make_network(architecture), prompts, block_size=16)
    first = world.step([Span(0, 0, 97), Span(1, 0, 39)])
    second = world.step([Span(1, 39, 40), Span(0, 97, 150)])
    for request, parts in ((0, (first[0], second[1])), (1, (first[1], second[0]))):
        expected = _reference(model, prompts[request])
        assert torch.allclose(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    tokens = random_tokens(random.Random(3), 100, VOCAB_SIZE)
    logits = dense(make_network("llama3", dtype), tokens)
    expected = dense(make_network("llama3"), tokens)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.15 * expected.std()


def test_linear_rope_scaling_and_other_biases() -> None:
    """Position interpolation, and biases on o and the MLP, which no tiny family has."""
    hf = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    base = config_of("llama2")
    config = replace(
        base,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        rope=replace(base.rope, kind="linear", factor=4.0),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
    tokens = random_tokens(random.Random(4), 80, VOCAB_SIZE)
    network = Network(config, model.state_dict(), device=CPU, dtype=torch.float32)
    assert torch.allclose(dense(network, tokens), _reference(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_expected_tensors_are_those_of_the_checkpoint(architecture: str) -> None:
    state = build_tiny(architecture).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    config = config_of(architecture)
    if config.tie_embeddings:
        del shapes["lm_head.weight"]
    assert expected_tensors(config) == shapes


def test_each_weight_is_read_once() -> None:
    """So that a mapping may load them as they are asked for."""
    config = config_of("qwen2")
    reads: list[str] = []

    class Recording(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            reads.append(name)
            return super().__getitem__(name)

    Network(config, Recording(build_tiny("qwen2").state_dict()), device=CPU, dtype=torch.float32)
    assert sorted(reads) == sorted(expected_tensors(config))


def test_only_wanted_rows_get_logits() -> None:
    network = make_network("qwen3")
    tokens = random_tokens(random.Random(5), 60, VOCAB_SIZE)
    expected = dense(network, tokens)
    world = PagedWorld(network, [tokens])
    assert torch.equal(world.runner.run(world.inputs([Span(0, 0, 60)], [59])), expected[59:])
    assert torch.equal(world.runner.run(world.inputs([Span(0, 0, 60)], [7, 3])), expected[[7, 3]])


def test_a_step_without_wanted_rows_writes_all_keys_and_values() -> None:
    network = make_network("llama3")
    tokens = random_tokens(random.Random(6), 60, VOCAB_SIZE)
    world = PagedWorld(network, [tokens])
    assert world.runner.run(world.inputs([Span(0, 0, 59)], [])).shape == (0, VOCAB_SIZE)
    assert torch.equal(world.step([Span(0, 59, 60)])[0], dense(network, tokens)[59:])


def test_numerics_name_all_that_bits_depend_on() -> None:
    names = {
        PagedWorld(make_network("llama2", dtype), [[1]]).runner.numerics for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(names) == 2
    assert all(torch.__version__ in name and "/cpu/" in name for name in names)
