"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed or padded
assign_jointly(costs, num_ranks)      all phases at once, whole examples
distribute_tokens(segments, ranks)    context parallelism: the blocks of a sequence, from who attends to whom
lower_bound, score                    what no placement undercuts; any placement, with its loads
ACTIVE_BACKEND                        "native", or "fallback" where the native core is not built
"""

from motet.balance.backend import ACTIVE_BACKEND, Backend
from motet.balance.costs import Cost, Packed, Padded
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign, lower_bound, score
from motet.balance.segments import Segments
from motet.balance.tokens import distribute_tokens

__all__ = [
    "ACTIVE_BACKEND",
    "Backend",
    "Cost",
    "Packed",
    "Padded",
    "Segments",
    "assign",
    "assign_jointly",
    "distribute_tokens",
    "lower_bound",
    "score",
]
