from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig, RopeConfig
from model.errors import BadConfig, ModelNotFound, UnsupportedModel
from model.hf_config import config_from_hf
from tests.model.tiny_checkpoints import FAMILIES, SIZES

# As published before transformers v5: rope_theta and rope_scaling at the top, many keys left to their defaults.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_every_value_of_a_published_llama_config(tmp_path: Path) -> None:
    assert config_from_hf(write(tmp_path, LLAMA)) == ModelConfig(
        architecture="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-05,
        rope=RopeConfig(theta=500000.0),
        max_positions=131072,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_config_saved_by_transformers(family: str, tmp_path: Path) -> None:
    saved = FAMILIES[family][0](**SIZES, eos_token_id=7)
    saved.save_pretrained(tmp_path)
    config = config_from_hf(tmp_path)
    assert config.architecture == family
    assert config.rope == RopeConfig(theta=5000.0)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (64, 4, 2)
    assert config.head_dim == (getattr(saved, "head_dim", None) or 16)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (family == "qwen2", False, family == "qwen3")
    assert config.sliding_window == (4096 if family == "mistral" else None)
    assert config.eos_token_ids == (7,)


def test_llama3_scaling_in_both_spellings(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = config_from_hf(write(tmp_path, {**LLAMA, "rope_scaling": scaling}))
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    expected = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert old.rope == config_from_hf(write(tmp_path, new)).rope == expected


def test_linear_scaling_in_its_oldest_spelling(tmp_path: Path) -> None:
    config = config_from_hf(write(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    assert config.rope == RopeConfig(theta=500000.0, kind="linear", factor=4.0)


def test_biases_as_the_families_have_them(tmp_path: Path) -> None:
    llama = config_from_hf(write(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True}))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": True}
    config = config_from_hf(write(tmp_path, qwen3))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)


def test_every_eos_id_is_kept_the_generation_config_first(tmp_path: Path) -> None:
    config = config_from_hf(write(tmp_path, {**LLAMA, "eos_token_id": [3, 4]}, {"eos_token_id": [9, 3]}))
    assert config.eos_token_ids == (9, 3, 4)
    config = config_from_hf(write(tmp_path, {**LLAMA, "eos_token_id": None}, {"eos_token_id": None}))
    assert config.eos_token_ids == ()


def test_mistral_without_a_window(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert config_from_hf(write(tmp_path, mistral)).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope type 'ntk'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"model_type": "qwen2", "architectures": None, "attention_bias": False}, "attention_bias = False"),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 1,
            },
            "use_sliding_window",
        ),
    ],
)
def test_what_would_be_served_wrongly_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named.replace("[", r"\[")):
        config_from_hf(write(tmp_path, {**LLAMA, **changes}))


def test_keys_of_other_tools_are_told_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "some_tool": 1}
    assert config_from_hf(write(tmp_path, {**LLAMA, **changes})) == config_from_hf(write(tmp_path, LLAMA))
    assert [record.getMessage() for record in caplog.records if record.name == "model.hf_config"] == [
        f"{tmp_path}: config keys that this server does not know are not used: some_tool"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 10_000 + "]" * 10_000, '{"a":' * 70 + "1" + "}" * 70])
def test_a_broken_config_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        config_from_hf(tmp_path)


VALUES_THAT_CANNOT_BE: list[tuple[str, object]] = [
    *((key, value) for key in ("vocab_size", "hidden_size", "max_position_embeddings") for value in (0, -1, 10**18)),
    *(("num_hidden_layers", value) for value in (0, 2.5, "2", None, True, [2])),
    *(("num_attention_heads", value) for value in (0, -4, 10**12)),
    *(("intermediate_size", value) for value in (0, math.nan)),
    *(("num_key_value_heads", value) for value in (0, 3, 8, -2, "2")),
    *(("head_dim", value) for value in (-16, 15, "16")),
    *(("rms_norm_eps", value) for value in (0, -1e-5, math.nan, math.inf, 10**12, None, "1e-5")),
    *(("rope_theta", value) for value in (0, -1.0, 1, math.nan, math.inf, "10000")),
    *(("eos_token_id", value) for value in (10**12, 128, -2, [2, 10**12], "2", [[2]], 2.0, True)),
    *(("bos_token_id", value) for value in (10**12, 128, "1", {})),
    ("tie_word_embeddings", "false"),
    ("attention_bias", 1),
    ("hidden_act", 3),
    ("sliding_window", -1),
    ("rope_scaling", "yarn"),
]


@pytest.mark.parametrize(("key", "value"), VALUES_THAT_CANNOT_BE, ids=str)
def test_a_value_that_cannot_be_is_named(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=rf"config\.json: {key} is ") as caught:
        config_from_hf(write(tmp_path, {**LLAMA, key: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "yarn", "factor": 0}, "factor is 0"),
        ({"rope_type": "yarn", "factor": math.nan}, "factor is nan"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast is 'x'"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position_"),
        ({"rope_type": "linear", "factor": math.inf}, "factor is inf"),
        ({"rope_type": "linear", "factor": None}, "factor is None"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}, "long_factor"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "default", "rope_theta": 0.0}, "rope_theta is 0.0"),
    ],
)
def test_a_rotary_setting_that_cannot_be_is_named(parameters: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    with pytest.raises(BadConfig, match=named):
        config_from_hf(write(tmp_path, {**config, "rope_parameters": {"rope_theta": 500000.0, **parameters}}))


@pytest.mark.parametrize("value", [10**12, 128, [2, -7], "2", {}])
def test_an_eos_id_of_the_generation_config_that_cannot_be_is_named(value: object, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"generation_config\.json: eos_token_id is "):
        config_from_hf(write(tmp_path, LLAMA, {"eos_token_id": value}))


@pytest.mark.parametrize("value", [-1, None])
def test_there_may_be_no_eos_or_bos(value: object, tmp_path: Path) -> None:
    config = config_from_hf(write(tmp_path, {**LLAMA, "eos_token_id": value, "bos_token_id": value}))
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize("layers", [3, 10**6, 10**9])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_more_layers_than_there_are_weights_of(layers: int, model_type: str, tmp_path: Path) -> None:
    """qwen2: transformers makes something for each layer while it reads the config."""
    config = {**LLAMA, "model_type": model_type, "architectures": None, "num_hidden_layers": layers}
    with pytest.raises(BadConfig, match=rf"num_hidden_layers is {layers}, but the weights have 2"):
        config_from_hf(write(tmp_path, config), num_layers=2)


def test_yarn_extends_the_positions_as_vllm_does(tmp_path: Path) -> None:
    """Qwen's model cards tell to add the scaling and leave the other keys as they are."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_from_hf(write(tmp_path, {**LLAMA, "max_position_embeddings": 32768, "rope_scaling": scaling}))
    assert config.max_positions == 131072


def test_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        config_from_hf(tmp_path)
