"""Packed items as dense batches, for modules that read neighbours: items of one size are one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.on_device import on_device


def by_size(sizes: Int64Array) -> Iterator[tuple[tuple[int, int], Int64Array, Int64Array]]:
    """Each size (height, width) with its items, ascending, and their rows among those of all items. O(rows).

    sizes: int64 [num_items, 2].
    """
    counts = sizes.prod(axis=1)
    starts = np.cumsum(counts) - counts
    kinds, kind = np.unique(sizes, axis=0, return_inverse=True)
    for number, (height, width) in enumerate(kinds.tolist()):
        items = np.flatnonzero(kind == number)
        yield (height, width), items, (starts[items, None] + np.arange(height * width)).reshape(-1)


def in_batches(rows: Tensor, sizes: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What a module makes of items, [sum(rows), channels of its output], in batches of one size each.

    rows: [sum(rows), channels]. sizes: int64 [num_items, 2] on the host.
    compute: takes rasters [num, channels, height, width] and which items they are, int64 [num] on the host, and gives
             rasters of the same height and width.
    """
    computed, order = [], []
    for (height, width), items, of_items in by_size(sizes.numpy()):
        order.append(of_items)
        own = rows[on_device(of_items, rows.device)].unflatten(0, (len(items), height, width))
        found = compute(own.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(items))
        computed.append(found.permute(0, 2, 3, 1).flatten(0, 2))
    restore = on_device(np.argsort(np.concatenate(order)), rows.device)
    return torch.cat(computed)[restore]


def check_rasters(sizes: Int64Array, what: str, divisor: int = 1, most: int | None = None) -> None:
    """Raise UserError for sizes of sequences, and for sides that do not divide, or are too long. what: makes them."""
    if sizes.shape[1] != 2:
        raise UserError(f"{what} makes rasters of rows and columns, and not sequences such as clips")
    wrong = (sizes % divisor).any(axis=1) | (sizes > (sizes if most is None else most)).any(axis=1)
    if (items := np.flatnonzero(wrong)).size:
        rows, columns = sizes[items[0]].tolist()
        bound = "" if most is None else f" and at most {most}"
        raise UserError(
            f"a raster of {rows} x {columns} rows is not what {what} makes; let the transform make sides that are "
            f"multiples of {divisor}{bound}, as by fixed_size or buckets"
        )
