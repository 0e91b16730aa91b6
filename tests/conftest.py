"""For all tests: what must be said before torch and Triton are first imported, by whichever test that is.

Compute threads that wait for one another sleep rather than spin, since tests share their cores. Without a GPU, Triton's
kernels run in its interpreter.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
