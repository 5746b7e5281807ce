"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)      one phase: packed, padded, or padded in attention only
assign_apart(lengths, cost, ...)      an encoder's phase, near the ranks that run its examples
assign_jointly(costs, num_ranks)      all phases at once, whole examples
distribute_tokens(segments, ranks)    context parallelism: the blocks of a sequence, from who attends to whom
split(costs, num_ranks, overhead)     items that dominate, cut into fragments
defer(costs, num_ranks, num_microbatches)  items that dominate, put into a microbatch of their own level
group(vision, text, ...)              samples into minibatches, a whole epoch at once
order_microbatches(forward_s, ...)    the order that leaves a pipeline short bubbles
choose(phases, num_ranks, link)       which of these is the fastest for a microbatch, and why
choose_step(phases, microbatch, ...)  the same for a step, whose microbatches may be dealt out anew
StepCosts(costs, work, times)         the phases of a microbatch, from its lengths
lower_bound, score                    what no placement undercuts; any placement, with its loads
ACTIVE_BACKEND                        "native", or "fallback" where the native core is not built

The words are in docs/glossary.md.
"""

from motet.balance.backend import ACTIVE_BACKEND, Backend
from motet.balance.choice import METHODS, Choice, Method, choose
from motet.balance.costs import Cost, Packed, Padded, PaddedAttention
from motet.balance.deferring import Deferral, defer
from motet.balance.fragments import Overhead, Split
from motet.balance.grouping import GroupCaps, Groups, dist_ratio, group, pad_ratio, suggest_caps
from motet.balance.home import crossing
from motet.balance.joint import assign_jointly
from motet.balance.nodes import place_on_nodes
from motet.balance.phases import Phase, assign_apart, follow
from motet.balance.placement import assign, lower_bound, score
from motet.balance.reordering import order_microbatches, pipeline_makespan
from motet.balance.segments import Segments
from motet.balance.splitting import split
from motet.balance.step_choice import StepChoice, choose_step
from motet.balance.step_costs import ASSUMED_SPEEDS, ItemWork, LengthWork, PhaseCosts, Speed, StepCosts, StepTimes
from motet.balance.tokens import distribute_tokens
from motet.core.cluster import Link
from motet.core.exchange import Network

__all__ = [
    "ACTIVE_BACKEND",
    "ASSUMED_SPEEDS",
    "METHODS",
    "Backend",
    "Choice",
    "Cost",
    "Deferral",
    "GroupCaps",
    "Groups",
    "ItemWork",
    "LengthWork",
    "Link",
    "Method",
    "Network",
    "Overhead",
    "Packed",
    "Padded",
    "PaddedAttention",
    "Phase",
    "PhaseCosts",
    "Segments",
    "Speed",
    "Split",
    "StepChoice",
    "StepCosts",
    "StepTimes",
    "assign",
    "assign_apart",
    "assign_jointly",
    "choose",
    "choose_step",
    "crossing",
    "defer",
    "dist_ratio",
    "distribute_tokens",
    "follow",
    "group",
    "lower_bound",
    "order_microbatches",
    "pad_ratio",
    "pipeline_makespan",
    "place_on_nodes",
    "score",
    "split",
    "suggest_caps",
]
