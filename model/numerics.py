"""What keeps a row's bits the same whatever rows are computed beside it, on CPU.

Three things in a CPU's torch look at the shape of the whole tensor, not at one row of it:

- float32 matrix products (MKL) use other kernels for the last rows when their number is not a multiple of the tile:
  the bits differ at 1, 2, 3, 5, 6, 7, 9... rows with AVX2, at 1, 2, 3 and 7 with AVX-512. So row counts are padded.
- elementwise functions written twice, for vectors and for the few elements left over at the end of the tensor or of one
  thread's part of it (`silu` is one) round differently there. `exp` is not one of them, and sums, products and
  quotients are exact to the last bit by IEEE 754.
- bfloat16 and float16 functions of that kind, for the same reason; so norms and softmax are computed in float32.

Sums along the last dimension are taken row by row and were never seen to depend on the other rows or the threads.
"""

from __future__ import annotations

import torch
from torch.nn import functional

ROW_MULTIPLE = 4 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16
"""Rows per tile, in which a decode step of few requests is computed: the fewest that were shown to be exact.

With AVX2 every multiple of 4 gave equal bits, in all shapes and thread counts tried (docs/log.md), and a decode step of
one request takes two thirds of the time it takes with 16. Elsewhere a multiple of every tile that MKL was seen to use
(4 and 8 with AVX-512), with room to spare.
"""


def padded_rows(count: int, device: torch.device) -> int:
    """`count` rounded up to whole tiles on CPU; unchanged elsewhere."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE if device.type == "cpu" else count


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [padded_rows(n), ...], zeros appended; the same tensor when nothing is missing."""
    missing = padded_rows(rows.shape[0], rows.device) - rows.shape[0]
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def silu(gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in float32, rounded once to the dtype of `gate`."""
    if gate.device.type != "cpu":
        return functional.silu(gate)
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(gate.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019): normalised in float32, scaled in the own dtype."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """A name for the arithmetic of everything but attention: two machines with other bits should have other names."""
    if device.type == "cpu":
        blas = "mkl" if torch.backends.mkl.is_available() else "blas"  # type: ignore[no-untyped-call]
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # multiplies prepacked weights
            blas = f"onednn-{blas}"
        unit = f"{torch.backends.cpu.get_cpu_capability()}-{blas}-rows{ROW_MULTIPLE}"
    elif device.type == "cuda":
        unit = torch.cuda.get_device_name(device).replace(" ", "_")
    else:
        unit = "default"
    return f"torch-{torch.__version__}/{device.type}/{unit}/{str(dtype).removeprefix('torch.')}"
