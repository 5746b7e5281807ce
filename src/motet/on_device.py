"""What the host computes and a device reads: indices, places, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_device(values: npt.NDArray[Any] | Tensor, device: torch.device | str) -> Tensor:
    """The values on a device, without a wait of the host.

    To an accelerator they go from pinned memory: a copy from other memory waits for all that was queued before it.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if tensor.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
