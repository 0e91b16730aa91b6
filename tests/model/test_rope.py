"""Rotary angles: the schemes against transformers', and a table whose entries depend on the position only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.config import RopeConfig
from model.hf_rope import rope_from_hf
from model.rope import CHUNK, RotaryTable, inverse_frequencies, rotate

CPU = torch.device("cpu")
LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
HF_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = [
    (
        RopeConfig(
            theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768, attention_factor=1.138629436111989
        ),
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        RopeConfig(1e4, "yarn", 8.0, 1.0, 4.0, 2048, None, 16.0, 2.0, False, 0.75),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 0.75,
        },
    ),
    (  # bounds that fall together
        RopeConfig(1e4, "yarn", 2.0, 1.0, 4.0, 8, None, 32.0, 32.0, True, 1.0693147180559945),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 32.0,
        },
    ),
]


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (RopeConfig(theta=1e6, kind="linear", factor=2.5), {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5}),
        (LLAMA3, HF_LLAMA3),
        *YARN,
    ],
)
def test_tables_equal_transformers(config: RopeConfig, parameters: dict[str, object]) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=parameters))
    positions = torch.tensor([0, 1, 39, 4095, 4096, 50000, 131071])
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = RotaryTable(config, 64, CPU).lookup(positions, 131072)
    assert torch.equal(inverse_frequencies(config, 64), theirs.inv_freq)
    assert torch.allclose(ours[0][:, 0], cos[0, :, :32], atol=1e-6)
    assert torch.allclose(ours[1][:, 0], sin[0, :, :32], atol=1e-6)


def test_frequency_factors_stand_in_place_of_the_scheme() -> None:
    factors = tuple(float(number) for number in range(1, 5))
    config = RopeConfig(kind="llama3", factor=8.0, frequency_factors=factors)
    assert torch.equal(inverse_frequencies(config, 8), inverse_frequencies(RopeConfig(), 8) / torch.tensor(factors))


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies(RopeConfig(kind="dynamic"), 8)


@pytest.mark.parametrize(("longest", "factors"), [(64, "short_factor"), (65, "long_factor")])
def test_longrope_takes_one_set_of_factors_for_all_lengths(longest: int, factors: str) -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 16 for i in range(8)],
        "long_factor": [1.0 + i * i for i in range(8)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    settled = rope_from_hf(Path("config.json"), parameters, 16, 256).settled(longest)
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=16, max_position_embeddings=256, rope_parameters=parameters))
    cos, sin = theirs(torch.zeros(1), torch.tensor([[0, 1, longest - 1]]))  # transformers chooses by the last one
    ours = RotaryTable(settled, 16, CPU).lookup(torch.tensor([0, 1, longest - 1]), 256)
    assert settled.frequency_factors == tuple(parameters[factors])
    assert torch.allclose(ours[0][:, 0], cos[0, :, :8], atol=1e-6)
    assert torch.allclose(ours[1][:, 0], sin[0, :, :8], atol=1e-6)


def test_an_entry_does_not_depend_on_how_the_table_grew() -> None:
    positions = torch.tensor([0, CHUNK - 1, CHUNK, 2 * CHUNK + 7])
    grown = RotaryTable(LLAMA3, 20, CPU)
    for end in (1, CHUNK, CHUNK + 1):
        grown.lookup(positions[:1], end)
    at_once = RotaryTable(LLAMA3, 20, CPU).lookup(positions, 3 * CHUNK)
    for ours, theirs in zip(grown.lookup(positions, 2 * CHUNK + 8), at_once, strict=True):
        assert torch.equal(ours, theirs)


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    table = RotaryTable(RopeConfig(), 16, CPU)
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated = [
            rotate(heads, *table.lookup(torch.tensor([position]), 200))
            for heads, position in ((query, query_position), (key, key_position))
        ]
        assert torch.allclose(rotated[0].norm(), query.norm())
        return (rotated[0] * rotated[1]).sum()

    assert torch.allclose(score(30, 10), score(120, 100), atol=1e-4)
