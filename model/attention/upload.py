"""Plans made on the host, on their way to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
