"""Reading config.json and generation_config.json of a Hugging Face directory into a ModelConfig.

transformers parses the file, so that its defaults and both spellings of the rotary settings (`rope_parameters` since
v5, `rope_theta` with `rope_scaling` before) mean what they mean there. What is read here is checked here: a value that
would make the network compute something else is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config_check import check_config
from model.errors import BadConfig, ModelNotFound, UnsupportedModel
from model.hf_rope import rope_from_hf
from model.hf_values import check_values, is_nested_too_deep, short, token_ids

_log = logging.getLogger(__name__)

_CAUSAL_LM = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Keys that other families, forks or quantizers use to change the arithmetic. transformers would ignore most of them in
# a config of ours, which hides a model that was made to run differently. Each may only hold its neutral value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "auto_map": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": (),
    "num_experts": (),
    "num_local_experts": (),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (),
    "use_mrope": (),
}

# Everything else in a config.json that does not change what a causal decoder computes, or that is read below.
_KNOWN = set(_NEUTRAL) | set(
    """
    _name_or_path architectures attention_bias attention_dropout bos_token_id dtype eos_token_id head_dim hidden_act
    hidden_size initializer_range intermediate_size is_llama_config layer_types max_position_embeddings
    max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers num_key_value_heads
    original_max_position_embeddings pad_token_id pretraining_tp rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window tie_word_embeddings torch_dtype transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_cache use_sliding_window vocab_size
    """.split()  # noqa: SIM905
)


_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rope": "rope_theta",
    "max_positions": "max_position_embeddings",
    "eos_token_ids": "eos_token_id",
}


def config_from_hf(path: Path, num_layers: int | None = None) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory.

    `num_layers` is how many layers the weights have: a config that asks for more is refused before anything is made
    for each of them.

    Raises:
        ModelNotFound: config.json is missing or is not JSON.
        BadConfig: a value that cannot be, or more layers than there are; file and key are named.
        UnsupportedModel: it asks for something this network does not compute; the key and value are named.
    """
    file = path / "config.json"
    raw = _read_json(file)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _CAUSAL_LM:
        raise UnsupportedModel(f"{path}: model_type {short(model_type)} is not one of {', '.join(_CAUSAL_LM)}.")
    _refuse_other_math(path, raw)
    check_values(file, raw)
    if num_layers is not None and raw.get("num_hidden_layers", 0) > num_layers:
        raise BadConfig(f"{file}: num_hidden_layers is {raw['num_hidden_layers']}, but the weights have {num_layers}.")
    parsed = _parse(path)
    if parsed.hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(f"{path}: hidden_act {parsed.hidden_act!r} is not silu.")
    config = _as_model_config(path, raw, parsed)
    check_config(config, file, _KEYS)
    return config


def _as_model_config(path: Path, raw: Mapping[str, Any], parsed: Any) -> ModelConfig:
    """`parsed` is transformers' own config object."""
    heads, model_type = parsed.num_attention_heads, raw["model_type"]
    attention_bias = bool(getattr(parsed, "attention_bias", False))
    head_dim = getattr(parsed, "head_dim", None) or parsed.hidden_size // heads
    positions = parsed.max_position_embeddings
    rope = rope_from_hf(path / "config.json", parsed.rope_parameters, head_dim, positions)
    if rope.kind == "yarn":  # some configs still say the original length there, and are meant for the extended one
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    return ModelConfig(
        architecture=model_type,
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(parsed, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        rms_norm_eps=float(parsed.rms_norm_eps),
        rope=rope,
        max_positions=positions,
        tie_embeddings=bool(parsed.tie_word_embeddings),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=bool(getattr(parsed, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        sliding_window=_sliding_window(path, parsed),
        bos_token_id=next(
            iter(token_ids(path / "config.json", "bos_token_id", parsed.bos_token_id, parsed.vocab_size)), None
        ),
        eos_token_ids=_eos_token_ids(path, raw, parsed),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist.") from error
    except RecursionError:
        raise ModelNotFound(f"{path} is nested too deeply.") from None
    except ValueError as error:
        raise ModelNotFound(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}.") from error
    if is_nested_too_deep(value):
        raise ModelNotFound(f"{path} is nested too deeply.")
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} holds no JSON object.")
    return value


def _parse(path: Path) -> Any:
    """transformers' own config object. Imported late: it takes seconds, and a GGUF does without."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validation raises many types, all of which mean: not a usable config
        raise UnsupportedModel(f"{path / 'config.json'} was not accepted by transformers: {error}") from error


def _refuse_other_math(path: Path, raw: Mapping[str, Any]) -> None:
    expected = _CAUSAL_LM[raw["model_type"]]
    architectures = raw.get("architectures")
    if architectures and architectures != [expected]:
        raise UnsupportedModel(f"{path}: architectures {architectures} is not [{expected!r}].")
    for key, neutral in _NEUTRAL.items():
        value = raw.get(key)
        if value not in (None, False, [], {}) and value not in neutral:
            raise UnsupportedModel(f"{path}: {key} = {value!r} is not supported.")
    # transformers ignores the key for these two families, so a config that says otherwise was meant for a fork.
    built_in_bias = {"mistral": False, "qwen2": True}.get(raw["model_type"])
    if built_in_bias is not None and raw.get("attention_bias", built_in_bias) != built_in_bias:
        raise UnsupportedModel(f"{path}: attention_bias = {raw['attention_bias']!r} is not what this family computes.")
    unknown = sorted(set(raw) - _KNOWN)
    if unknown:
        _log.warning("%s: config keys that this server does not know are not used: %s", path, ", ".join(unknown))


def _sliding_window(path: Path, config: Any) -> int | None:
    """The window that every layer has, or None. Windows in some layers only are refused."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type == "mistral":
        window = config.sliding_window
        return int(window) if window else None
    if layer_types != {"full_attention"}:
        raise UnsupportedModel(
            f"{path}: sliding windows per layer are not supported (use_sliding_window, layer_types "
            f"{sorted(layer_types)})."
        )
    return None


def _eos_token_ids(path: Path, raw: Mapping[str, Any], parsed: Any) -> tuple[int, ...]:
    """Every id that ends a text, generation_config.json's first: chat models name their turn's end only there."""
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    ids = token_ids(generation_path, "eos_token_id", generation.get("eos_token_id"), parsed.vocab_size)
    ids += token_ids(
        path / "config.json", "eos_token_id", raw.get("eos_token_id", parsed.eos_token_id), parsed.vocab_size
    )
    return tuple(dict.fromkeys(ids))
