"""The strategies that `motet plan` searches, by the names that they are pinned by."""

from __future__ import annotations

from collections.abc import Mapping

from motet.planner import bubble_filling, chain, data_parallel, degrees, disaggregated, encoder_plans, modality
from motet.planner.candidate import Informed, Strategy

STRATEGIES: Mapping[str, Strategy] = {
    data_parallel.NAME: data_parallel.data_parallel,
    degrees.STRATEGY: chain.chain,
    modality.STRATEGY: modality.modality_parallel,
    disaggregated.NAME: disaggregated.disaggregated,
    encoder_plans.STRATEGY: Informed(bubble_filling.bubble_filling),
}
"""Of equally fast Plans, that of the earlier strategy is preferred."""
