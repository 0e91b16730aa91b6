"""The default model as peers read it, with the same weights that our server computes with.

    PEERS_HOME/models/hf-DTYPE/       config, tokenizer and safetensors, as Hugging Face publishes models
    PEERS_HOME/models/DTYPE.gguf      the shipped file with its tensors dequantized, metadata as it was

DTYPE is float32 or bfloat16. Both are made from the shipped GGUF file by this project's own reader.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from model.load import load_model
from model.source import ModelSource, resolve

HOME = Path(os.environ.get("PAGEKV_PEERS", Path.home() / ".cache" / "pagekv-peers"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_TYPES = {
    "float32": (LlamaFileType.ALL_F32, GGMLQuantizationType.F32),
    "bfloat16": (LlamaFileType.MOSTLY_BF16, GGMLQuantizationType.BF16),
}


def default_model() -> ModelSource:
    """The GGUF file that is served when no model is named."""
    return resolve(None)


def hf_directory(dtype: str) -> Path:
    """The model as a Hugging Face directory; written on the first call."""
    target = HOME / "models" / f"hf-{dtype}"
    if not target.exists():
        _in_place(target, lambda draft: _write_hf(default_model(), DTYPES[dtype], draft))
    return target


def gguf_file(dtype: str) -> Path:
    """The model as an unquantized GGUF file; written on the first call."""
    target = HOME / "models" / f"{dtype}.gguf"
    if not target.exists():
        _in_place(target, lambda draft: _write_gguf(default_model().path, dtype, draft))
    return target


def _in_place(target: Path, write: Callable[[Path], None]) -> None:
    """What is cut off halfway is not taken for the whole the next time."""
    draft = target.with_name(f"draft-{target.name}")
    if draft.is_dir():
        shutil.rmtree(draft)
    draft.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    write(draft)
    draft.rename(target)


def _write_hf(source: ModelSource, dtype: torch.dtype, target: Path) -> None:
    loaded = load_model(source, dtype=dtype, device=torch.device("cpu"), progress=False)
    folder, name = str(source.path.parent), source.path.name
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    make_generation: Any = GenerationConfig  # untyped in transformers
    make_generation(**ends, pad_token_id=tokenizer.eos_token_id).save_pretrained(target)
    save_file(loaded.weights, target / "model.safetensors", metadata={"format": "pt"})


def _write_gguf(source: Path, dtype: str, target: Path) -> None:
    """Tensor by tensor, as llama.cpp laid them out: its order of rows within the rotary heads is kept."""
    file_type, tensor_type = FILE_TYPES[dtype]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            key, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None
        )
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.tensor_type == GGMLQuantizationType.F32 or tensor_type == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
