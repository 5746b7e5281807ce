"""A backbone's pass whose row has parts of it: it runs in one call, and what stands between two parts runs inside.

Fills run beside tensor-parallel communication so (Optimus, section 2.3 and Figure 3). Of each half of a layer there are
two parts in the row, and two collectives in the pass:

    row      part 0          part 1   part 2         part 3   ...   last part
    pass     rows gathered | half   | half's sum ... | half   | ...   half, its sum
                       fills             fills

What stands before the first half runs while its rows are gathered, and what stands before another one while the sum of
the half before it is on its way. The other collectives, gathers of later halves and the last sum, have nothing beside
them. Where ranks have all rows, as rows of encoders enter again, there are sums alone. A pass with fewer collectives
than parts, as of a stage without rows, runs what is left behind itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from motet.schedule.program import Action
from motet.tensor_parallel import RowParts


class PartedPass:
    """What stands between the parts of one pass.

    first: its first part, which runs. num_parts: of the pass. reach: runs the row up to a part (`Executor.reach`).

    Example:
        >>> from motet.schedule import Kind
        >>> parted = PartedPass(Action(0, Kind.F, 0, 0), num_parts=4, reach=lambda part: print("up to", part))
        >>> parted.meanwhile(False)
        up to 0F0.1
        >>> parted.meanwhile(True)
        up to 0F0.3
        >>> parted.meanwhile(True)  # the last sum: nothing is left
    """

    def __init__(self, first: Action, num_parts: int, reach: Callable[[Action], None]) -> None:
        self._first, self._num_parts, self._reach = first, num_parts, reach
        self._part = 0

    @contextmanager
    def beside(self, rows: RowParts | None) -> Iterator[None]:
        """In the block, the pass runs. rows: those that its tensor-parallel ranks share; None: it is not shared."""
        if rows is not None:
            rows.meanwhile = self.meanwhile
        try:
            yield
        finally:
            if rows is not None:
                rows.meanwhile = None
        self._reach_part(self._num_parts - 1)

    def meanwhile(self, is_sum: bool) -> None:
        """As of `RowParts`."""
        if is_sum:
            self._reach_part(max(self._part, 1) + 2)
        elif self._part == 0:
            self._reach_part(1)

    def _reach_part(self, part: int) -> None:
        if self._part < part < self._num_parts:
            self._part = part
            self._reach(self._first._replace(part=part))
