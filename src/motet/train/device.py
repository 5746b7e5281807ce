"""What a rank's device is called in the catalogue."""

from __future__ import annotations

import torch

from motet.core.cluster import Device
from motet.cost.catalogue import device_called


def device_name(device: torch.device) -> str:
    """The name of a device in the catalogue; "" for a GPU that is not in it."""
    if device.type == "cpu":
        return "cpu"
    known = catalogued(device)
    return "" if known is None else known.name


def catalogued(device: torch.device) -> Device | None:
    """A GPU as the catalogue has it; None for one that is not in it, and for a CPU."""
    return None if device.type == "cpu" else device_called(torch.cuda.get_device_name(device))
