"""The indexes of several manifests as one: examples are numbered through all, left-out ones included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.modalities import IMAGE
from motet.data.example_lengths import ExampleLengths
from motet.data.index import Index
from motet.data.media import OF_SEVERAL, MediaRef


class Indexes:
    """The indexes of all manifests, one after the other.

    starts:        int64 [num_manifests + 1], the number of each manifest's first example; then how many there are.
    tells_several: images beside others say so.

    Example: with indexes of 10 and 5 examples, `Indexes(indexes).at(12)` is the second index and 2.
    """

    def __init__(self, indexes: Sequence[Index], *, tells_several: bool = False) -> None:
        self._indexes, self._tells_several = list(indexes), tells_several
        self.starts = np.cumsum([0, *(len(index) for index in self._indexes)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[Index]:
        return iter(self._indexes)

    def at(self, number: int) -> tuple[Index, int]:
        """The index that holds an example, and the example's number there. number: through all manifests."""
        i = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self._indexes[i], number - int(self.starts[i])

    def columns(self, numbers: Int64Array) -> ExampleLengths:
        """The columns of whole examples. numbers: through all manifests."""
        return ExampleLengths.of(self._indexes, self.starts, numbers, tells_several=self._tells_several)

    def told(self, refs: list[MediaRef]) -> list[MediaRef]:
        """The same items, where images beside others say so if their transform is told."""
        if not self._tells_several or sum(ref.modality == IMAGE for ref in refs) < 2:
            return refs
        return [
            replace(ref, raw=(ref.raw[0], ref.raw[1] + OF_SEVERAL)) if ref.modality == IMAGE and ref.raw else ref
            for ref in refs
        ]
