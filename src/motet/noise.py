"""Random numbers of items: noise that depends on the item's key and the row, and on nothing else.

Keys are those by which dropout is drawn (`motet/dropout.py`): they depend on the run, the step and the example. So a
step on any number of ranks, balanced in any way, draws what one process draws. Bits are SplitMix64's (Steele et al.
2014), one stream a row; normal numbers are made of two uniform ones (Box and Muller 1958).
"""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import Int64Array
from motet.dropout import mixed_bits, stream
from motet.on_device import on_device

_GAMMA = -0x61C8864680B583EB
"""The odd constant of SplitMix64 as int64."""


def uniform_of_items(keys: Int64Array, name: str) -> Tensor:
    """A number in [0, 1) of each item, float64 [num_items], on the host. name: of the draw; others are independent."""
    bits = stream(keys.view(np.uint64) ^ np.uint64(crc32(name.encode())), np.zeros(1, np.int64))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normal_of_rows(keys: Int64Array, counts: Int64Array, width: int, name: str, device: torch.device) -> Tensor:
    """Normal numbers, float64 [sum(counts), width]. counts: rows of each item, int64 [num_items].

    A row's numbers depend on its item's key, on its number in the item, and on `name`. O(rows x width).
    """
    of_item = stream(keys.view(np.uint64) ^ np.uint64(crc32(name.encode())), np.zeros(1, np.int64))
    row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = on_device(stream(np.repeat(of_item, counts), row).view(np.int64), device)
    columns = torch.arange(1, 2 * width + 1, device=device) * _GAMMA
    # The upper 53 bits, which the shift of a signed number fills with its sign.
    bits = mixed_bits(rows[:, None] + columns) >> 11 & 2**53 - 1
    units = (bits.to(torch.float64) + 0.5) * 2.0**-53
    radius = (-2 * units[:, :width].log()).sqrt()
    return radius * torch.cos(2 * math.pi * units[:, width:])
