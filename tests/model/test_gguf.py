"""Loading GGUF files: written here as llama.cpp's converter writes them, and the default model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from model.config import ModelConfig, RopeConfig
from model.errors import BadConfig, BadWeights, UnsupportedModel
from model.gguf_config import config_from_gguf
from model.gguf_file import SUPPORTED_TYPES, GgufFile
from model.hf_config import config_from_hf
from model.load import LoadedModel, load_model
from model.source import ModelSource, SourceKind, resolve
from tests.model.tiny_checkpoints import gguf_tensors, make_network, permute, save_hf, write_gguf

CPU = torch.device("cpu")
Kind = GGMLQuantizationType
QUANTIZABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(ModelSource(path, SourceKind.GGUF, path.stem), dtype=dtype, device=CPU, progress=False)


def requantized(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    if values.dim() == 1 or kind == Kind.F32:
        return values
    data = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, kind)))


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("architecture", "family"), [("llama", "llama"), ("llama", "mistral"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_every_tensor_equals_the_quantized_original(architecture: str, family: str, kind: Kind, tmp_path: Path) -> None:
    """Rows are permuted whole, and blocks of a quantization lie within rows, so the two can be exchanged."""
    network = make_network(family)
    path = write_gguf(tmp_path / "m.gguf", architecture, network.config, gguf_tensors(network, architecture), kind)
    loaded = load(path)
    expected = network.state_dict()
    assert loaded.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded.weights[name], requantized(tensor, kind), rtol=0, atol=0, msg=name)


def test_only_architecture_llama_is_permuted() -> None:
    """The test above would pass if neither side permuted: this holds that one of the two sides does."""
    network = make_network("llama")
    name, key = "model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"
    written = gguf_tensors(network, "llama")[key]
    original = network.state_dict()[name].numpy()
    # Row 1 of the file is the first row of the second half of head 0 (head_dim 16).
    assert np.array_equal(written[:4], original[[0, 8, 1, 9]])
    assert np.array_equal(gguf_tensors(make_network("qwen2"), "qwen2")[key][1], original_row("qwen2", name, 1))


def original_row(family: str, name: str, row: int) -> np.ndarray:
    return make_network(family).state_dict()[name][row].numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_safetensors_give_the_same_model(family: str, tied: bool, tmp_path: Path) -> None:
    network = make_network(family, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    network.config.eos_token_id = [2, 5]
    network.generation_config.eos_token_id = [2, 5]
    network.config.bos_token_id = 1
    hf = save_hf(network, tmp_path / "hf")
    file = write_gguf(tmp_path / "m.gguf", family, network.config, gguf_tensors(network, family))
    from_hf = load_model(ModelSource(hf, SourceKind.HF, "m"), dtype=torch.float32, device=CPU, progress=False)
    from_gguf = load(file)
    assert from_gguf.config == from_hf.config == config_from_hf(hf)
    assert from_gguf.digest == from_hf.digest


def test_biases_of_architecture_llama(tmp_path: Path) -> None:
    network = make_network("llama", attention_bias=True, mlp_bias=True)
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", network.config, gguf_tensors(network, "llama")))
    assert (loaded.config.qkv_bias, loaded.config.o_bias, loaded.config.mlp_bias) == (True, True, True)
    for name, tensor in network.state_dict().items():
        assert torch.equal(loaded.weights[name], tensor), name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_are_dequantized_by_the_library(kind: Kind, tmp_path: Path) -> None:
    """The Python package reads these and cannot write them, so the bytes are random, but for finite scales."""
    network = make_network("qwen2")
    name, hf_name = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = network.state_dict()[hf_name].shape
    assert columns % block == 0
    data = np.random.default_rng(0).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    half = np.frombuffer(np.float16([0.25, -0.5]).tobytes(), dtype=np.uint8)
    if kind == Kind.Q6_K:
        data[:, -2:] = half[:2]
    else:
        data[:, :4] = half
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.isfinite(expected).all() and expected.std() > 0
    tensors = gguf_tensors(network, "qwen2")
    path = write_gguf(tmp_path / "m.gguf", "qwen2", network.config, tensors, raw={name: (data, kind)})
    torch.testing.assert_close(load(path).weights[hf_name], expected, rtol=0, atol=0)


def test_conversion_to_half_precision(tmp_path: Path) -> None:
    network = make_network("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", network.config, gguf_tensors(network, "llama"), Kind.BF16)
    whole, half = load(path), load(path, torch.bfloat16)
    assert all(torch.equal(half.weights[name], tensor.bfloat16()) for name, tensor in whole.weights.items())
    assert whole.digest != half.digest


def gguf_of(tmp_path: Path, tensors: dict[str, np.ndarray | None] | None = None, **metadata: Any) -> Path:
    """A tiny Llama with tensors added, replaced or (None) left out, and further `llama.*` metadata."""
    network = make_network("llama")
    changed = {**gguf_tensors(network, "llama"), **(tensors or {})}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    return write_gguf(tmp_path / "m.gguf", "llama", network.config, kept, **metadata)


def test_rope_factors_are_part_of_the_config_not_of_the_weights(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    loaded = load(gguf_of(tmp_path, {"rope_freqs.weight": factors}))
    assert loaded.config.rope == RopeConfig(theta=5000.0, frequency_factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in loaded.weights
    with pytest.raises(BadWeights, match=r"rope_freqs\.weight holds 4 factors, expected 8"):
        load(gguf_of(tmp_path, {"rope_freqs.weight": factors[:4]}))


def test_linear_rope_scaling(tmp_path: Path) -> None:
    config = load(gguf_of(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)).config
    assert config.rope == RopeConfig(theta=5000.0, kind="linear", factor=4.0)


def test_a_sliding_window_is_told(tmp_path: Path) -> None:
    assert load(gguf_of(tmp_path, attention__sliding_window=96)).config.sliding_window == 96


def test_a_tied_head_is_one_that_the_file_leaves_out(tmp_path: Path) -> None:
    assert load(gguf_of(tmp_path, {"output.weight": None})).config.tie_embeddings


def test_eos_ids_are_the_end_of_text_and_of_turn(tmp_path: Path) -> None:
    config = load(gguf_of(tmp_path)).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope__scaling__type": "dynamic"}, "rope scaling 'dynamic'"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"attention__causal": False}, "llama.attention.causal = False"),
        ({"logit_scale": 0.25}, "llama.logit_scale = 0.25"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping = 50.0"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count"),
        ({"attention__value_length": 8}, "llama.attention.value_length"),
        ({"attention__head_count_kv": [2, 1]}, "llama.attention.head_count_kv differs between layers: [2, 1]"),
    ],
)
def test_what_would_be_served_wrongly_is_refused_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(named)):
        load(gguf_of(tmp_path, **metadata))


def test_harmless_metadata_is_accepted(tmp_path: Path) -> None:
    load(gguf_of(tmp_path, expert_count=0, rope__dimension_count=16, attention__causal=True, vocab_size=128))


def test_metadata_that_is_missing_or_absurd_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"no llama\.embedding_length"):
        load(gguf_of(tmp_path, embedding_length=None))
    with pytest.raises(BadConfig, match=r"llama\.attention\.head_count is 0"):
        load(gguf_of(tmp_path, attention__head_count=0))


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    small = np.zeros((2, 2), dtype=np.float32)
    changes = {"blk.0.ffn_up.weight": small, "blk.1.attn_norm.weight": None, "blk.0.attn_qkv.weight": small}
    with pytest.raises(BadWeights) as caught:
        load(gguf_of(tmp_path, changes))
    told = str(caught.value)
    assert "missing tensors: model.layers.1.input_layernorm.weight" in told
    assert "unexpected tensors: blk.0.attn_qkv.weight" in told
    assert "model.layers.0.mlp.up_proj.weight is [2, 2], expected [256, 64]" in told


def test_a_file_without_an_embedding(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=r"no tensor token_embd\.weight"):
        load(gguf_of(tmp_path, {"token_embd.weight": None}))


def test_other_architectures_and_quantizations_are_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "gemma.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture 'gemma' is not one of llama, qwen2, qwen3"):
        load(tmp_path / "gemma.gguf")
    network = make_network("llama")
    data = np.zeros((64, 256 // 256 * 84), dtype=np.uint8)
    raw = {"blk.0.ffn_down.weight": (data, Kind.Q2_K)}
    path = write_gguf(tmp_path / "m.gguf", "llama", network.config, gguf_tensors(network, "llama"), raw=raw)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_down\.weight is quantized as Q2_K"):
        load(path)


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="one part of a split model"):
        load(tmp_path / "a-00001-of-00002.gguf")


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_a_file_cut_off_anywhere_is_named(fraction: float, tmp_path: Path) -> None:
    path = gguf_of(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(BadWeights, match=r"m\.gguf is not a complete GGUF file"):
        load(path)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(BadWeights, match="not a complete GGUF file"):
        load(path)


# SmolLM2-135M: 106.2 M parameters in its blocks, 28.3 M in the tied head.
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-05,
    rope=RopeConfig(theta=100000.0),
    max_positions=8192,
    tie_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(resolve(None), dtype=torch.bfloat16, device=CPU, progress=False)


class TestDefaultModel:
    def test_its_config(self, loaded: LoadedModel) -> None:
        assert loaded.config == SMOLLM2

    def test_its_weights(self, loaded: LoadedModel) -> None:
        assert len(loaded.weights) == 30 * 9 + 2
        assert "lm_head.weight" not in loaded.weights
        assert {tensor.dtype for tensor in loaded.weights.values()} == {torch.bfloat16}
        assert sum(tensor.numel() for tensor in loaded.weights.values()) == 134_515_008

    def test_its_tensors_are_of_supported_types_and_q_is_restored(self, loaded: LoadedModel) -> None:
        file = GgufFile(loaded.source.path)
        assert {tensor.tensor_type for tensor in file.tensors.values()} <= SUPPORTED_TYPES
        assert config_from_gguf(file) == loaded.config
        query = loaded.weights["model.layers.3.self_attn.q_proj.weight"].float().numpy()
        stored = file.tensor("blk.3.attn_q.weight").bfloat16().float().numpy()
        assert np.array_equal(permute(query, 9), stored)
