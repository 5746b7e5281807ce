"""Which rank computes which item: every balancing decision of a step, from integer costs alone, the same on all ranks.

assign(lengths, num_ranks, cost)           places the items of one phase: packed, padded, or padded in attention only
assign_apart(lengths, cost, ...)           places an encoder's items near the ranks that run their examples
assign_jointly(costs, num_ranks)           places whole examples; balances all phases at once
distribute_tokens(segments, num_ranks)     places the blocks of a sequence (context parallelism) by their attention work
split(costs, num_ranks, overhead)          cuts the items that dominate a phase into fragments
defer(costs, num_ranks, num_microbatches)  puts the long items of a step into one microbatch
group(vision, text, ...)                   puts the samples of an epoch into minibatches
order_microbatches(forward_s, ...)         orders the microbatches of a pipeline so that its bubbles are short
choose(phases, num_ranks, link)            takes the fastest method for a microbatch, and says why
choose_step(phases, microbatch, ...)       decides whether examples of a step change their microbatch
StepCosts(costs, work, times)              computes the phases of a microbatch from its lengths
lower_bound, score                         a bound on every placement; the loads of any placement
ACTIVE_BACKEND                             "native", or "fallback" where the native core is not built

The words are in docs/glossary.md.
"""

from motet.balance.backend import ACTIVE_BACKEND, Backend
from motet.balance.choice import METHODS, Choice, Method, choose
from motet.balance.costs import Cost, Packed, Padded, PaddedAttention
from motet.balance.deferring import Deferral, defer
from motet.balance.fragments import Overhead, Split
from motet.balance.grouping import (
    GroupCaps,
    Groups,
    dist_ratio,
    group,
    group_phases,
    pad_ratio,
    suggest_caps,
    suggest_phase_caps,
)
from motet.balance.home import crossing
from motet.balance.joint import assign_jointly
from motet.balance.nodes import place_on_nodes
from motet.balance.phases import Phase, assign_apart, follow
from motet.balance.placement import assign, lower_bound, score
from motet.balance.reordering import island_makespans, order_islands, order_microbatches, pipeline_makespan
from motet.balance.segments import Segments
from motet.balance.splitting import split
from motet.balance.step_choice import StepChoice, choose_step
from motet.balance.step_costs import (
    ASSUMED_SPEEDS,
    ItemMemory,
    ItemWork,
    LengthWork,
    PhaseCosts,
    Speed,
    StepCosts,
    StepTimes,
)
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
    "ItemMemory",
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
    "group_phases",
    "island_makespans",
    "lower_bound",
    "order_islands",
    "order_microbatches",
    "pad_ratio",
    "pipeline_makespan",
    "place_on_nodes",
    "score",
    "split",
    "suggest_caps",
    "suggest_phase_caps",
]
