"""What the items of a microbatch take of their ranks' memory, and what a placement of them lacks.

A rank keeps all of its items from their forward to their backward pass. Beside that it has what one layer works on. Of
a cut item it has a share, and copies of the keys and values of the rest, which its rows see in attention. Some layers
have an item whole all the same, on the rank with its largest fragment: those in which a merge of the user's own has it.
So has that rank the rows of encoders which the merge takes in; without one they are shared out as the sequence is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from motet.balance.fragments import Split
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.assignment import Assignment


@dataclass(frozen=True, eq=False)
class ItemBytes:
    """Bytes that the items of a phase take of the memory of the rank that computes them.

    kept:    int64 [num_items], from an item's forward to its backward pass.
    working: int64 [num_items, num_kinds], beside that, while a layer of a kind runs.
    most:    int64 [num_kinds], the most that a kind works on at once, whatever the rank has (logits come in pieces).
    copied, copied_working: as `kept` and `working`, of copies of the keys and values of all of an item's rows.
    whole:   of layers that have items whole, cut or not, and of what is taken in there; None: there are none. All else
             is of the other layers.

    Example:
        A rank with a quarter of an item keeps a quarter of it, and copies of three quarters:
        >>> one = np.array([[80]])
        >>> items = ItemBytes(np.array([400]), one, np.array([1000]), np.array([40]), one // 4)
        >>> kept, working = items.of_fragments(np.array([0]), np.array([1]), np.array([4]))
        >>> kept.tolist(), working.tolist()
        ([130], [[35]])
    """

    kept: Int64Array
    working: Int64Array
    most: Int64Array
    copied: Int64Array
    copied_working: Int64Array
    whole: ItemBytes | None = None

    def of_fragments(self, item: Int64Array, size: Int64Array, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        """What fragments keep, int64 [n], and work on, int64 [n, num_kinds]. Each has `size` of an item's `units`."""

        def of(whole: Int64Array, copies: Int64Array) -> Int64Array:
            own, all_units = (each.reshape(-1, *[1] * (whole.ndim - 1)) for each in (size, units))
            shared: Int64Array = -(-(whole[item] * own + copies[item] * (all_units - own)) // all_units)
            return shared

        return of(self.kept, self.copied), of(self.working, self.copied_working)

    @property
    def alone(self) -> Int64Array:
        """What each item takes of a rank that has nothing else, int64 [num_items]."""
        layers = [self] if self.whole is None else [self, self.whole]
        busiest = [np.minimum(each.working, each.most).max(axis=1, initial=0) for each in layers]
        needed: Int64Array = np.sum([each.kept for each in layers], axis=0) + np.max(busiest, axis=0)
        return needed

    @property
    def copied_share(self) -> float:
        """The largest share of what an item takes that a fragment may have beside its own, as copies; at most 1."""
        copies = self.copied + self.copied_working.max(axis=1, initial=0)
        return min(float((copies / np.maximum(self.alone, 1)).max(initial=0.0)), 1.0)

    def take(self, has_item: BoolArray) -> ItemBytes:
        """Of some of the items. has_item: bool [num_items]."""
        columns = ("kept", "working", "copied", "copied_working")
        whole = None if self.whole is None else self.whole.take(has_item)
        return replace(self, whole=whole, **{name: getattr(self, name)[has_item] for name in columns})


def lacking_bytes(
    phases: Iterable[tuple[ItemBytes | None, Assignment, Split | None]], num_ranks: int, room_bytes: int | None
) -> int:
    """What the fullest rank lacks of the memory that a placement takes; 0 if all fits, and where nothing is known.

    phases:     of each, what its items take, where they are, and where its fragments are if some are cut.
    room_bytes: what items may take on a rank; None: it is not known.
    Padding is not counted.
    """
    if room_bytes is None:
        return 0
    kept, working = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    for items, placed, cut in _by_layers(phases):
        own_kept, own_working, ranks = items.kept, items.working, placed.ranks
        if cut is not None:
            own_kept, own_working = items.of_fragments(cut.item, cut.end - cut.begin, cut.units[cut.item])
            ranks = cut.assignment.ranks
        np.add.at(kept, ranks, own_kept)
        working = np.maximum(working, _working(own_working, items.most, ranks, num_ranks))
    return max(int((kept + working).max()) - room_bytes, 0)


def _by_layers(
    phases: Iterable[tuple[ItemBytes | None, Assignment, Split | None]],
) -> Iterator[tuple[ItemBytes, Assignment, Split | None]]:
    """The same, of layers that have items whole by themselves: there an item is on the rank that `placed` says."""
    for items, placed, cut in phases:
        if items is not None:
            yield items, placed, cut
            if items.whole is not None:
                yield items.whole, placed, None


def _working(own: Int64Array, most: Int64Array, ranks: Int32Array, num_ranks: int) -> Int64Array:
    """What each rank works on at most at once in a phase, int64 [num_ranks]."""
    of_rank = np.zeros((num_ranks, len(most)), dtype=np.int64)
    np.add.at(of_rank, ranks, own)
    busiest: Int64Array = np.minimum(of_rank, most).max(axis=1, initial=0)
    return busiest
