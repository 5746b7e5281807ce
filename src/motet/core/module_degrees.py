"""The degrees of parallelism that a user states of one module: `[parallel.NAME]` of a recipe, or in code."""

from __future__ import annotations

import math
from dataclasses import dataclass

from motet.core.limited import NumRanks


@dataclass(frozen=True)
class ModuleDegrees:
    """The parallelism of one module (Cornstarch section 3.1: ParallelSpec). None leaves a degree to the planner.

    tp, cp, dp, ep: degrees of the unit that runs the module. ep adds no ranks.
    pp:         the number of pipeline ranks that hold blocks of the module. In a chain it may be less than the unit's.

    Example:
        >>> degrees = ModuleDegrees(pp=2, dp=1)
        >>> degrees.allow(pp=2, tp=4), degrees.allow(pp=1)
        (True, False)
        >>> print(degrees)
        pp = 2, dp = 1
    """

    tp: NumRanks | None = None
    cp: NumRanks | None = None
    pp: NumRanks | None = None
    dp: NumRanks | None = None
    ep: NumRanks | None = None

    def allow(self, **chosen: int) -> bool:
        """Whether each chosen degree is the stated one, or is not stated."""
        return all(getattr(self, name) in (None, value) for name, value in chosen.items())

    @property
    def stated(self) -> dict[str, int]:
        """The degrees that are stated, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def num_ranks(self) -> int:
        """The product of the stated degrees that have ranks of their own."""
        return math.prod(value for name, value in self.stated.items() if name != "ep")

    def or_else(self, other: ModuleDegrees) -> ModuleDegrees:
        """These degrees, and those of another where none is stated here."""
        return ModuleDegrees(**other.stated | self.stated)

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.stated.items())


ANY_DEGREES = ModuleDegrees()
"""Nothing is stated."""
