"""Arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array's values on the device, of its dtype and shape.

    A GPU gets it through pinned memory, in the order of its stream: a copy from ordinary memory would make the host wait for
    all work before it, and the GPU then wait for what the host does next. On a CPU it shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
