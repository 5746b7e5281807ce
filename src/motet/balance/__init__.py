"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed or padded
assign_jointly(costs, num_ranks)      all phases at once, whole examples
lower_bound, score                    what no placement undercuts; any placement, with its loads
place_on_nodes(volume, ...)           balanced batches to the nodes that hold most of them
crossing(assignment, home, ...)       the share that leaves its node
"""

from motet.balance.backend import Backend
from motet.balance.costs import Cost, Packed, Padded
from motet.balance.home import crossing
from motet.balance.joint import assign_jointly
from motet.balance.nodes import place_on_nodes
from motet.balance.placement import assign, lower_bound, score

__all__ = [
    "Backend",
    "Cost",
    "Packed",
    "Padded",
    "assign",
    "assign_jointly",
    "crossing",
    "lower_bound",
    "place_on_nodes",
    "score",
]
