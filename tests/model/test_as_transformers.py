"""Checkpoints as people keep them: the logits are those of transformers, on both backends."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.errors import BadWeights
from model.load import LoadedModel, open_model
from model.network import Network
from model.source import ModelSource, SourceKind
from tests.model.cpu import c_dense, native, runner_of
from tests.model.paged import CPU, dense, random_tokens
from tests.model.tiny_checkpoints import make_network, save_hf

TOLERANCE = 1e-4
Change = Callable[[dict[str, torch.Tensor]], None]
ORIGINAL = 64  # positions
HEAD_DIM = 64


def load(path: Path, longest: int = 128) -> LoadedModel:
    opened = open_model(ModelSource(path, SourceKind.HF, path.name)).settled(longest)
    return opened.load(dtype=torch.float32, device=CPU, progress=False)


def theirs(path: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def assert_equal_logits(path: Path, count: int = 50, longest: int = 128) -> None:
    tokens = random_tokens(random.Random(1), count, 128)
    expected = theirs(path, tokens)
    assert expected.std() > 0.05  # else the tolerance would say little
    loaded = load(path, longest)
    network = Network(loaded.config, dict(loaded.weights), device=CPU, dtype=torch.float32)
    assert torch.allclose(dense(network, tokens), expected, atol=TOLERANCE, rtol=0)
    built = native("f32")
    ours = c_dense(loaded.config, runner_of(loaded.config, loaded.weights, built), torch.float32, tokens)
    assert torch.allclose(ours, expected, atol=TOLERANCE, rtol=0)


def save(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """A tiny network whose heads the C backend takes; its weights are large enough that each counts."""
    network = make_network(family, **{"head_dim": HEAD_DIM, **overrides})
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return save_hf(network, path)


def rewrite(path: Path, change: Change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)


def head_that_differs_in_its_last_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 8


def equal_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def only_the_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def without_prefix_and_with_a_head(tensors: dict[str, torch.Tensor]) -> None:
    without_prefix(tensors)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].flip(0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("change", "is_tied"),
    [
        (other_head, False),
        (head_that_differs_in_its_last_value, False),
        (equal_head, True),
        (only_the_head, True),
        (without_prefix, True),
        (without_prefix_and_with_a_head, False),
    ],
)
def test_a_tied_head(
    family: str, change: Change, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head_dim = {} if family != "qwen2" else {"head_dim": 64, "hidden_size": 256}
    path = save(tmp_path, family, tie_word_embeddings=True, **head_dim)
    rewrite(path, change)
    assert_equal_logits(path)
    assert load(path).config.tie_embeddings == is_tied
    assert ("lm_head.weight holds other values" in caplog.text) == (not is_tied)


def test_tensors_without_their_prefix_and_an_untied_head(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=False)
    rewrite(path, without_prefix)
    assert_equal_logits(path)


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.2.mlp.up_proj.weight"],
        ["visual.patch_embed.weight", "model.layers.0.self_attn.q_proj.bias"],
        [f"score.{index}" for index in range(40)],
    ],
)
def test_extra_tensors_are_named_in_a_warning(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path)
    rewrite(path, lambda tensors: tensors.update({name: torch.ones(2, 2) for name in names}))
    assert_equal_logits(path)
    told = [record.getMessage() for record in caplog.records if record.name == "model.load"]
    assert len(told) == 1 and "does not use" in told[0]
    assert all(name in told[0] for name in sorted(names)[:16])


def test_frequencies_that_old_checkpoints_carry_are_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path)
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(path)
    assert not caplog.records


def shard(path: Path, stale: dict[str, torch.Tensor]) -> None:
    """Two shards and their index; the second one also has `stale` tensors, which the index has in the first."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    weight_map = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    assert all(weight_map[name] == files[0] for name in stale)
    save_file({name: tensors[name] for name in halves[0]}, path / files[0], metadata={"format": "pt"})
    save_file({**stale, **{name: tensors[name] for name in halves[1]}}, path / files[1], metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_stale_copy_in_another_shard_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path / "m", tie_word_embeddings=False)
    expected = load(path).weights
    shard(path, {"model.embed_tokens.weight": torch.zeros(128, 64), "lm_head.weight": torch.zeros(3)})
    found = load(path).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tensor_that_no_index_names_twice_is_ambiguous(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=False)
    shard(path, {"model.embed_tokens.weight": torch.zeros(128, 64)})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match="is both in"):
        load(path)


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "rope_type": "yarn"},
        {**YARN, "type": "yarn"},
        {**YARN, "type": "yarn", "attention_factor": 0.8},
        {**YARN, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    ids=lambda scaling: "-".join(scaling),
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn(scaling: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = save(tmp_path)
    config = json.loads((path / "config.json").read_text())
    for old in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(old, None)
    config |= {key: scaling, "rope_theta": 5000.0} if key == "rope_scaling" else {key: {**scaling, "rope_theta": 5e3}}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(path, count=120)


@pytest.mark.parametrize("attention_factor", [None, 1.3])
@pytest.mark.parametrize(("count", "longest"), [(50, ORIGINAL), (100, ORIGINAL + 36)])
def test_longrope(attention_factor: float | None, count: int, longest: int, tmp_path: Path) -> None:
    """transformers chooses by the length of the text, here the longest one decides for all."""
    half = HEAD_DIM // 2
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "short_factor": [1.0 + index / half for index in range(half)],
        "long_factor": [1.0 + index / 4 for index in range(half)],
        "original_max_position_embeddings": ORIGINAL,
        "factor": 2.0,
        **({} if attention_factor is None else {"attention_factor": attention_factor}),
    }
    path = save(tmp_path, rope_parameters=scaling)
    assert_equal_logits(path, count, longest)
    short, long = load(path, ORIGINAL), load(path, ORIGINAL + 1)
    assert short.digest != long.digest  # nothing that one cached may be served by the other
