"""Compiles the kernels for GPUs that are not here: `python -m tests.model.compile_triton CAPABILITY`, such as 90.

Prints one JSON document: per kernel and tile height, the bytes of shared memory of a program. TRITON_INTERPRET must be
unset.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.attention import triton_kernels as kernels
from model.attention.triton_kernels import SEGMENT, TILE_SLOTS
from model.attention.triton_paged import HIGH, LOW

POINTERS = {
    **dict.fromkeys(("tables", "tiles", "bounds"), "*i32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    **dict.fromkeys(("peaks", "totals", "mixes"), "*fp32"),
}
NUMBERS = {
    **{"SLOT_STRIDE": 128, "BLOCK_SIZE": 16, "HEADS_PER_KV": 4, "HEAD_DIM": 128, "WIDTH": 128},
    **{"SEGMENT": SEGMENT, "TILE_SLOTS": TILE_SLOTS, "WIDEN": False, "KV_HEADS": 8, "NUMBERS": 1024},
}


def compile_for(kernel: triton.JITFunction, capability: int, rows: int, warps: int, stages: int) -> int:
    """Returns the shared memory that one program takes."""
    signature, constants, divisible = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            constants[(index,)] = rows if name == "TILE_ROWS" else NUMBERS[name]
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name.endswith("_stride") else POINTERS.get(name, "*bf16")
            if name != "table_stride":
                divisible[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, divisible),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False},
    )
    assert "cubin" in compiled.asm
    return int(compiled.metadata.shared)


def main(capability: int) -> None:
    low, high = (LOW.rows, LOW.warps, LOW.stages), (HIGH.rows, HIGH.warps, HIGH.stages)
    found = {
        "segments, low": compile_for(kernels.attend_segments, capability, *low),
        "whole, high": compile_for(kernels.attend_whole, capability, *high),
        "merge": compile_for(kernels.merge_segments, capability, LOW.rows, 4, 3),
        "write": compile_for(kernels.write_slots, capability, LOW.rows, 4, 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
