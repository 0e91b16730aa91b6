"""Rotary angles: the schemes against transformers', and a table whose entries depend on the position only."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.config import RopeConfig
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


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (RopeConfig(theta=1e6, kind="linear", factor=2.5), {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5}),
        (LLAMA3, HF_LLAMA3),
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
    with pytest.raises(ValueError, match="yarn"):
        inverse_frequencies(RopeConfig(kind="yarn"), 8)


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
