"""What the host computes and a device reads: indices, places, tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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


class Staged:
    """Values of the host that go to a device when they are asked for there. They may be made in another thread, which
    pins them; the thread that asks copies them, on the stream on which it computes.

    Example:
        >>> [places] = Staged([np.array([2, 0])], torch.device("cpu")).there
        >>> places.tolist()
        [2, 0]
    """

    def __init__(self, values: Sequence[npt.NDArray[Any] | Tensor], device: torch.device) -> None:
        """values: on the host."""
        self._device = device
        tensors = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in values]
        self._values = tensors if device.type in ("cpu", "meta") else [each.pin_memory() for each in tensors]

    @cached_property
    def there(self) -> tuple[Tensor, ...]:
        """The values on the device."""
        values, self._values = self._values, []  # Pinned memory is not kept beside them.
        return tuple(on_device(each, self._device) for each in values)
