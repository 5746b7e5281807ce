"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed or padded
assign_jointly(costs, num_ranks)      all phases at once, whole examples
split(costs, num_ranks, overhead)     items that dominate, cut into fragments
defer(costs, num_ranks, num_microbatches)  items that dominate, put into a microbatch of their own level
choose(phases, num_ranks, link)       which of these is the fastest for a microbatch, and why
choose_step(phases, microbatch, ...)  the same for a step, whose microbatches may be dealt out anew
lower_bound, score                    what no placement undercuts; any placement, with its loads
ACTIVE_BACKEND                        "native", or "fallback" where the native core is not built
"""

from motet.balance.backend import ACTIVE_BACKEND, Backend
from motet.balance.choice import METHODS, Choice, Method, choose
from motet.balance.costs import Cost, Packed, Padded
from motet.balance.deferring import Deferral, defer
from motet.balance.fragments import Overhead, Split
from motet.balance.joint import assign_jointly
from motet.balance.phases import Link, Phase, follow
from motet.balance.placement import assign, lower_bound, score
from motet.balance.splitting import split
from motet.balance.step_choice import StepChoice, choose_step

__all__ = [
    "ACTIVE_BACKEND",
    "METHODS",
    "Backend",
    "Choice",
    "Cost",
    "Deferral",
    "Link",
    "Method",
    "Overhead",
    "Packed",
    "Padded",
    "Phase",
    "Split",
    "StepChoice",
    "assign",
    "assign_jointly",
    "choose",
    "choose_step",
    "defer",
    "follow",
    "lower_bound",
    "score",
    "split",
]
