"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed, padded, or padded in attention only
assign_jointly(costs, num_ranks)      all phases at once, whole examples
group(vision, text, ...)              samples into minibatches, a whole epoch at once
order_microbatches(forward_s, ...)    the order that leaves a pipeline short bubbles
lower_bound, score                    what no placement undercuts; any placement, with its loads
"""

from motet.balance.backend import Backend
from motet.balance.costs import Cost, Packed, Padded, PaddedAttention
from motet.balance.grouping import GroupCaps, Groups, dist_ratio, group, pad_ratio, suggest_caps
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign, lower_bound, score
from motet.balance.reordering import order_microbatches, pipeline_makespan

__all__ = [
    "Backend",
    "Cost",
    "GroupCaps",
    "Groups",
    "Packed",
    "Padded",
    "PaddedAttention",
    "assign",
    "assign_jointly",
    "dist_ratio",
    "group",
    "lower_bound",
    "order_microbatches",
    "pad_ratio",
    "pipeline_makespan",
    "score",
    "suggest_caps",
]
