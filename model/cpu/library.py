"""The compiled library of one kind of processor and word, and its structures as ctypes sees them (csrc/pk.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind

PANEL = 32  # columns of a panel
TILE = 16  # slots of a tile of K or V
GROUP = 32  # values along the depth that are quantized together
QUANTIZED_KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
TIMES = ("linear", "attention", "rows", "head")


class NotBuilt(Exception):
    """The library is not there, or is not the one that this code was written for."""


class Matrix(ctypes.Structure):
    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("quantized", c_void_p),
        ("panel_at", c_void_p),
        ("kind", c_void_p),
        ("columns", c_int32),
        ("depth", c_int32),
    ]


class Delta(ctypes.Structure):
    _fields_ = [("down", Matrix), ("up", Matrix)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "layers", "vocab")),
        ("block_size", c_int32),
        ("eps", c_float),
        ("quantized_rows", c_int32),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    ]


class Adapter(ctypes.Structure):
    _fields_ = [
        ("deltas", POINTER(Delta)),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("num_rows", c_int32),
        ("num_logits", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "slots", "groups", "last_groups", "logit_rows", "tables")),
        ("adapters", POINTER(Adapter)),
        *((name, c_void_p) for name in ("cache", "cos", "sin", "logits")),
        ("seconds", POINTER(c_double)),
        *((name, c_int32) for name in ("rows", "num_groups", "num_last_groups", "num_logits", "table_width")),
        ("num_adapters", c_int32),
    ]


GROUP_FIELDS = 4  # int32: row, count, position, table
_SIZES = [*(ctypes.sizeof(kind) for kind in (Matrix, Delta, Layer, Model)), 4 * GROUP_FIELDS]
_SIZES += [ctypes.sizeof(Adapter), ctypes.sizeof(Step)]


class Library:
    """The functions of one compiled library.

    Raises NotBuilt.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotBuilt(str(error)) from error
        sizes = (c_int32 * len(_SIZES))()
        library.pk_sizes(sizes)
        if list(sizes) != _SIZES:
            raise NotBuilt(f"{path} was built from other sources; install pagekv again")
        self.open: Any = library.pk_open
        self.open.argtypes, self.open.restype = [POINTER(Model), c_int], c_void_p
        self.close: Any = library.pk_close
        self.close.argtypes, self.close.restype = [c_void_p], None
        self.step: Any = library.pk_step
        self.step.argtypes, self.step.restype = [c_void_p, POINTER(Step)], c_int
        self.dequantize: Any = library.pk_dequantize
        self.dequantize.argtypes, self.dequantize.restype = [c_int, c_void_p, c_int64, c_void_p], None
        self.pack_quantized: Any = library.pk_pack_quantized
        self.pack_quantized.argtypes = [c_int, c_void_p, c_int64, c_int, c_void_p]
        self.pack_quantized.restype = None
        self.pack_words: Any = library.pk_pack_words
        self.pack_words.argtypes, self.pack_words.restype = [c_void_p, *[c_int64] * 3, c_void_p], None
        self.group_bytes: Any = library.quantized_group_bytes
        self.group_bytes.argtypes, self.group_bytes.restype = [c_int], c_size_t
        self.rouse: Any = library.pk_rouse
        self.rouse.argtypes, self.rouse.restype = [c_void_p], None
        self.set_quantized_rows: Any = library.pk_set_quantized_rows
        self.set_quantized_rows.argtypes, self.set_quantized_rows.restype = [c_void_p, c_int], None


def find_library(variant: str, directories: Sequence[Path] = (Path(__file__).parent,)) -> Path:
    """The file that pip built for `variant`, such as avx2_bf16. Raises NotBuilt."""
    for directory in directories:
        found = sorted(directory.glob(f"_{variant}.*so"))
        if found:
            return found[0]
    raise NotBuilt("it was not built, as no C compiler was found when pagekv was installed")
