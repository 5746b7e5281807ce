"""The strategies that `motet plan` searches, by the names that they are pinned by."""

from __future__ import annotations

from collections.abc import Mapping

from motet.planner.candidate import Strategy
from motet.planner.chain import chain

STRATEGIES: Mapping[str, Strategy] = {"chain": chain}
"""Of equally fast Plans, that of the earlier strategy is preferred."""
