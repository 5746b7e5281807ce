"""The strategies that `motet plan` searches, by the names that pins use."""

from __future__ import annotations

from collections.abc import Mapping

from motet.planner.bubble_filling.propose import propose_bubble_filling
from motet.planner.candidate import (
    BUBBLE_FILLING,
    CHAIN,
    DATA_PARALLEL,
    DISAGGREGATED,
    MODALITY_PARALLEL,
    BoundedStrategy,
    PruningStrategy,
    Strategy,
)
from motet.planner.chain.propose import propose_chain
from motet.planner.data_parallel.propose import propose_data_parallel
from motet.planner.disaggregated.propose import propose_disaggregated
from motet.planner.modality_parallel.propose import propose_modality_parallel

STRATEGIES: Mapping[str, Strategy] = {
    DATA_PARALLEL: BoundedStrategy(propose_data_parallel),
    CHAIN: propose_chain,
    MODALITY_PARALLEL: propose_modality_parallel,
    DISAGGREGATED: propose_disaggregated,
    BUBBLE_FILLING: PruningStrategy(propose_bubble_filling),
}
"""The strategies by name. If two Plans are equally fast, the search prefers that of the earlier strategy."""
