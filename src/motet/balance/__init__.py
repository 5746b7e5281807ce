"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed or padded
assign_jointly(costs, num_ranks)      all phases at once, whole examples
choose(phases, num_ranks, link)       which way is the fastest for these lengths, and why
lower_bound, score                    what no placement undercuts; any placement, with its loads
ACTIVE_BACKEND                        "native", or "fallback" where the native core is not built
"""

from motet.balance.backend import ACTIVE_BACKEND, Backend
from motet.balance.choice import METHODS, Choice, Link, Method, Phase, choose, follow
from motet.balance.costs import Cost, Packed, Padded
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign, lower_bound, score

__all__ = [
    "ACTIVE_BACKEND",
    "METHODS",
    "Backend",
    "Choice",
    "Cost",
    "Link",
    "Method",
    "Packed",
    "Padded",
    "Phase",
    "assign",
    "assign_jointly",
    "choose",
    "follow",
    "lower_bound",
    "score",
]
