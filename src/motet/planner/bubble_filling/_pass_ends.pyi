"""The native core of fill_times.py, csrc/bubbles/: what `Direction.advanced` places, for one pipeline."""

from collections.abc import Sequence

class PassEnds:
    """The ranks of an encoder pipeline, in the order in which a microbatch visits them.

    ranks:  per rank, the slices of each encoder's pass as `BubbleRoom.tables` has them.
    send_s: a message from one rank to the next.

    Raises ValueError for starts or capacities that do not ascend, or differ in number, and for no slices.
    """

    def __init__(
        self, ranks: Sequence[Sequence[tuple[list[float], list[float], list[int], float, int]]], send_s: float
    ) -> None: ...
    def through(self, begins_s: Sequence[float], ends_s: Sequence[float]) -> tuple[float, ...]:
        """The ends of all ranks' passes, to the bit, once microbatches are through that are ready at begins_s.

        ends_s: when each rank's last pass ended before. Raises IndexError where bubbles do not hold all slices.
        """
