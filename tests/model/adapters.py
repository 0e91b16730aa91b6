"""Small random LoRA adapters of the tiny checkpoints, made and saved by peft."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from model.inputs import AdapterRows
from model.lora import LoraAdapter
from tests.model.paged import Span
from tests.model.tiny import build_tiny

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build_adapter(architecture: str, seed: int = 1, **config: Any) -> PeftModel:
    """A tiny model under an adapter whose every matrix is random and large enough to matter to the logits."""
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft still asks transformers by a deprecated name
        model = get_peft_model(build_tiny(architecture), LoraConfig(**values)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 * parameter.shape[-1] ** -0.5)
    return model


def save_adapter(architecture: str, path: Path, seed: int = 1, **config: Any) -> PeftModel:
    """Write adapter_config.json and adapter_model.safetensors to a directory, and return what was written."""
    model = build_adapter(architecture, seed, **config)
    model.save_pretrained(str(path))
    return model


def rows_of(spans: Sequence[Span], adapters: Sequence[LoraAdapter | None]) -> tuple[AdapterRows, ...]:
    """The rows of a step that each adapter changes; `adapters` are the requests', None for the base model."""
    owners = [adapters[span.request] for span in spans for _ in range(span.start, span.end)]
    return tuple(
        AdapterRows(torch.tensor([row for row, owner in enumerate(owners) if owner is adapter]), adapter)
        for adapter in dict.fromkeys(owners)
        if adapter is not None
    )
