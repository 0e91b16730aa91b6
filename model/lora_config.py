"""What a peft LoRA directory says of itself: which projections it changes, at which rank and how strongly.

Each value means what it means in peft's LoraConfig (https://github.com/huggingface/peft). What would make the adapter
compute anything else than W + scaling * B A is refused by name, and so is every value that is not known here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]  # in place of re, which cannot be told when to give up

from model.errors import AdapterError

MATCH_SECONDS = 0.5
"""For one pattern against one module's name; a pattern that backtracks for ever would hold up the whole engine."""

_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "bias",
    "init_lora_weights",
}
_WITHOUT_EFFECT = {  # on what a trained adapter computes
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that also change the base weights: the adapter is meant for those, not for the original."""

_ELSEWHERE = ("model.embed_tokens", "lm_head")
"""Modules that peft can adapt and this network does not."""


@dataclass(frozen=True, slots=True)
class Target:
    """A projection that an adapter changes: W x becomes W x + scaling * B A x, with A [rank, in] and B [out, rank]."""

    module: str  # its Hugging Face name: model.layers.0.self_attn.q_proj
    rank: int
    scaling: float


def read_targets(file: Path, modules: Sequence[str]) -> list[Target]:
    """Those of the network's projections `modules` that the adapter_config.json at `file` chooses.

    Raises AdapterError: not readable, not a plain LoRA adapter, or it chooses none of them.
    """
    config = _Config(file, _read_json(file))
    config.refuse_unsupported()
    chosen = set(config.chosen((*modules, *_ELSEWHERE)))
    for module in _ELSEWHERE:
        if module in chosen:
            raise config.refusal("target_modules", f"adapters of {module} are not supported")
    if not chosen:
        raise config.refusal("target_modules", "it names no projection of this model")
    return [config.target(module) for module in modules if module in chosen]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{file} is not an object of named values.")
    return values


class _Config:
    """The values of one adapter_config.json, checked as they are read."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values
        self._targets = self._names("target_modules")
        self._excluded = self._names("exclude_modules")
        self._layers = self._layer_indices()
        self._layer_lists = self._names("layers_pattern")
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")

    def refusal(self, key: str, why: str) -> AdapterError:
        return AdapterError(f"{self._file}: {key} is {self._values.get(key)!r}: {why}.")

    def refuse_unsupported(self) -> None:
        if self._values.get("peft_type") != "LORA":
            raise self.refusal("peft_type", "only LORA is supported")
        if self._values.get("bias", "none") != "none":
            raise self.refusal("bias", "adapters with biases are not supported")
        begun = self._values.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
            raise self.refusal(
                "init_lora_weights", "the adapter belongs to changed base weights; have peft convert it when saving"
            )
        for key, value in self._values.items():
            if value and key not in _READ and key not in _WITHOUT_EFFECT:
                raise self.refusal(key, "this is not supported")
        if isinstance(self._targets, str) and (self._layers is not None or self._layer_lists):
            key = "layers_to_transform" if self._layers is not None else "layers_pattern"
            raise self.refusal(key, "it goes with a list of target_modules only")
        if self._layer_lists and self._layers is None:
            raise self.refusal("layers_pattern", "it goes with layers_to_transform only")

    # -- which modules ------------------------------------------------------------------------------------------------

    def chosen(self, modules: Sequence[str]) -> list[str]:
        """Those of `modules` that peft would adapt (peft.tuners.tuners_utils.check_target_module_exists)."""
        if self._targets is None:
            raise self.refusal("target_modules", "it must say which modules are adapted")
        return [module for module in modules if self._is_target(module) and not self._is_excluded(module)]

    def _is_target(self, module: str) -> bool:
        if isinstance(self._targets, str):
            if self._targets.lower() == "all-linear":
                return module not in _ELSEWHERE
            return self._fullmatch("target_modules", self._targets, module)
        assert self._targets is not None
        return _ends_with_any(module, self._targets) and self._is_in_layers(module)

    def _is_excluded(self, module: str) -> bool:
        if isinstance(self._excluded, str):
            return self._fullmatch("exclude_modules", self._excluded, module)
        return self._excluded is not None and _ends_with_any(module, self._excluded)

    def _is_in_layers(self, module: str) -> bool:
        if self._layers is None:
            return True
        lists = [self._layer_lists] if isinstance(self._layer_lists, str) else self._layer_lists
        for pattern in lists or [r"[^.]*"]:
            if index := self._match("layers_pattern", rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module):
                return int(index["index"]) in self._layers
        return False

    # -- how strongly -------------------------------------------------------------------------------------------------

    def target(self, module: str) -> Target:
        rank = self._for_module("rank_pattern", self._ranks, module, self._values.get("r", 8))
        alpha = self._for_module("alpha_pattern", self._alphas, module, self._values.get("lora_alpha", 8))
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise AdapterError(f"{self._file}: the rank of {module} is {rank!r}, not a positive integer.")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise AdapterError(f"{self._file}: the alpha of {module} is {alpha!r}, not a number.")
        rank_stabilized = self._values.get("use_rslora", False)
        if not isinstance(rank_stabilized, bool):
            raise self.refusal("use_rslora", "it must be true or false")
        # Rank-stabilized: Kalajdzievski 2023 (https://arxiv.org/abs/2312.03732).
        return Target(module, rank, alpha / math.sqrt(rank) if rank_stabilized else alpha / rank)

    def _for_module(self, key: str, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        """The value whose pattern matches the module's last parts (peft.utils.other.get_pattern_key).

        Where several match, peft takes the first; but it sorts them when it saves, so which was the first in training
        is not known any more. Unless they agree they are refused.
        """
        found = {
            pattern: value for pattern, value in patterns.items() if self._match(key, rf"(.*\.)?({pattern})$", module)
        }
        values = list(found.values()) or [default]
        if any(value != values[0] for value in values):
            raise self.refusal(key, f"{', '.join(found)} all match {module}, and say different things")
        return values[0]

    # -- values of the right type -------------------------------------------------------------------------------------

    def _names(self, key: str) -> str | list[str] | None:
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value or None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refusal(key, "it must be a string or a list of strings")
        return value

    def _layer_indices(self) -> set[int] | None:
        value = self._values.get("layers_to_transform")
        indices = [value] if isinstance(value, int) else value or None
        if indices is None:
            return None
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise self.refusal("layers_to_transform", "it must be a layer's index or a list of them")
        return set(indices)

    def _pattern(self, key: str) -> Mapping[str, Any]:
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise self.refusal(key, "it must map patterns of module names to numbers")
        return value

    def _fullmatch(self, key: str, pattern: str, module: str) -> bool:
        with self._regular(key):
            return regex.fullmatch(pattern, module, timeout=MATCH_SECONDS) is not None

    def _match(self, key: str, pattern: str, module: str) -> Any:
        with self._regular(key):
            return regex.match(pattern, module, timeout=MATCH_SECONDS)

    @contextmanager
    def _regular(self, key: str) -> Iterator[None]:
        try:
            yield
        except regex.error as error:
            raise self.refusal(key, f"it is not a regular expression ({error})") from error
        except TimeoutError as error:
            raise self.refusal(key, "it takes too long to match against a module's name") from error


def _ends_with_any(module: str, names: Sequence[str]) -> bool:
    """Whether the last parts of the module's dotted name are one of `names`."""
    return any(module == name or module.endswith(f".{name}") for name in names)
