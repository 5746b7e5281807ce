"""`Plan.balance` in a pipeline: whole microbatches over the backbone's replicas, items over those of encoder units.

Colocated phases move rows to be balanced. Here they move in any case, from unit to unit. So "joint" and "per_phase"
differ by which rows may go where:

- "joint": the microbatches that replicas of the backbone take are dealt out by the work of all modules. Items follow
  their examples, as without balancing, and islands stay apart.
- "split": as "joint", but for the microbatches in which a sequence alone is more work than a replica's share of the
  backbone. Such sequences are cut over several replicas, and the whole ones of the microbatch fill up the others
  (`item_shares.py`), whatever groups they were in. Encoders' items follow the largest fragment of their sequence; those
  of cut sequences that dominate their microbatch are dealt out over replicas and cut too, of encoders in the backbone's
  unit. A Plan's `order` may deal microbatches out in the place of "joint" (`ordering.py`).
- "per_phase", and "auto", which is the same as it is never slower: items of an encoder with ranks of its own go to any
  replica of its unit. They are even in each microbatch (OrchMLLM section 5). Microbatches are dealt out by the work of
  the modules on the backbone's ranks.

Work is counted in operations, whatever a recipe states: simulation and training decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from motet.assign.balancing import policies_of
from motet.assign.item_shares import FULLEST, item_shares, joined_cuts
from motet.assign.pipeline import Batching, assign_batching, positions_in
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.balance import Cost, assign
from motet.balance.costs import cost_of
from motet.core.arrays import Int64Array
from motet.core.cuts import ItemCuts
from motet.core.plan import Plan
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.operations import Operations
from motet.schedule.plan_units import (
    backbone_unit,
    cuts_beside_sequences,
    joins_all_replicas,
    on_backbone_ranks,
    recomputed_in,
    shares_items,
)


def assign_balanced(plan: Plan, batch: BatchLengths, given: Batching) -> StepAssignment:
    """The assignment of a pipeline's step whose microbatches and items are balanced. given: the batching without.

    Raises UserError as `policies_of` does. O(items log items), and `assign` for each encoder and microbatch.
    """
    policies = policies_of(plan.model, plan.policy)
    work = item_work(plan, batch)
    if plan.balance == "split":
        return assign_cut(plan, batch, dealt_evenly(plan, batch, given, work), work)
    names = [module.name for module in plan.model.modules]
    shared = [name for name in names if joins_all_replicas(plan) and shares_items(plan, name)]
    here = on_backbone_ranks(plan)
    dealt_by = names if not shared else [name for name in names if name in here]
    step = assign_batching(plan, batch, dealt_evenly(plan, batch, given, {name: work[name] for name in dealt_by}))
    balanced = {
        name: _balanced(step.modules[name], step.num_microbatches, work[name], cost_of(policies[name]))
        for name in shared
    }
    modules = {name: balanced.get(name, step.modules[name]) for name in names}
    return replace(step, modules=modules, methods=_methods(plan, step))


def item_work(plan: Plan, batch: BatchLengths) -> dict[str, Int64Array]:
    """Operations of each item of each module, int64 [num_items]."""
    return Operations(plan.model, recomputed_in(plan))(batch)


def assign_cut(plan: Plan, batch: BatchLengths, dealt: Batching, work: Mapping[str, Int64Array]) -> StepAssignment:
    """The assignment of a step whose microbatches are dealt out, with sequences that are cut over replicas of the
    backbone. What is cut, and on which replicas, depends on which examples share a microbatch, and on nothing else.

    work: as of `item_work`.
    """
    dealt, cuts = _cut(plan, batch, dealt, work[BACKBONE])
    step = assign_batching(plan, batch, dealt)
    modules = {**step.modules, BACKBONE: replace(step.modules[BACKBONE], cuts=cuts)}
    if cuts is not None:
        for name in (name for name in modules if cuts_beside_sequences(plan, name)):
            modules[name] = _with_cut_items(modules[name], plan.model.module(name), cuts.items, work[name])
    return replace(step, modules=modules, methods=_methods(plan, step))


def _with_cut_items(items: ModuleAssignment, module: Module, cut: Int64Array, work: Int64Array) -> ModuleAssignment:
    """The items of an encoder, where those of sequences that are cut dominate their microbatch dealt out over all
    replicas, and cut too. All others stay with their sequences, so that none moves whose sequence is left out.

    cut: the examples whose sequences are. work: int64 [num_items].
    """
    replica, position, parts, num = items.replica.copy(), items.position.copy(), [], items.num_replicas
    for microbatch in np.unique(items.microbatch[np.isin(items.example, cut)]).tolist():
        inside = np.flatnonzero(items.microbatch == microbatch)
        own = inside[np.isin(items.example[inside], cut)]
        if work[own].max() * num <= FULLEST * work[inside].sum():
            continue
        shares = item_shares(work[own], items.num_tokens[own], num, can_cut=True, tile_rows=module.tile_rows)
        replica[own] = shares.ranks
        position[inside] = positions_in(replica[inside].astype(np.int64), items.example[inside])
        if shares.cuts is not None:
            parts.append((shares.cuts, own, 0))
    return replace(items, replica=replica, ordered=position, cuts=joined_cuts(parts, position))


def _methods(plan: Plan, step: StepAssignment) -> tuple[str, ...]:
    return (plan.balance,) * step.num_microbatches


def dealt_evenly(plan: Plan, batch: BatchLengths, given: Batching, work: Mapping[str, Int64Array]) -> Batching:
    """The batching that gives each replica of the backbone equally many of the given microbatches, of even work.

    work: of the modules that count, int64 [num_items].
    """
    dp, size = backbone_unit(plan).dp, plan.microbatch_size
    if dp == 1:
        return given
    replica, index = np.divmod(given.index, size)
    num_microbatches = plan.batch_size // (dp * size)
    loads = np.zeros(dp * num_microbatches, dtype=np.int64)
    for name, of_items in work.items():
        example = batch.of(name).example
        np.add.at(loads, (given.microbatch * dp + replica)[example], of_items)
    slots = assign(loads, dp, equal_counts=True).slots[given.microbatch * dp + replica]
    replica, microbatch = np.divmod(slots.astype(np.int64), num_microbatches)
    return Batching(microbatch, replica * size + index)


def _cut(plan: Plan, batch: BatchLengths, dealt: Batching, work: Int64Array) -> tuple[Batching, ItemCuts | None]:
    """The batching with other replicas in the microbatches of which sequences are cut, and these; None: none is.

    work: of the sequences, int64 [num_examples].
    """
    dp, size, parts, index = backbone_unit(plan).dp, plan.microbatch_size, [], dealt.index.copy()
    for microbatch in range(plan.batch_size // (dp * size)):
        inside = np.flatnonzero(dealt.microbatch == microbatch)
        shares = item_shares(work[inside], batch.sequence[inside], dp, can_cut=True)
        if shares.cuts is not None:
            # Any number of examples may be on a replica, which has `size` indexes.
            num_here = np.bincount(shares.ranks, minlength=dp)[shares.ranks]
            index[inside] = shares.ranks * size + positions_in(shares.ranks, index[inside]) * size // num_here
            parts.append((shares.cuts, inside, 0))
    return Batching(dealt.microbatch, index), joined_cuts(parts, np.arange(batch.num_examples))


def _balanced(items: ModuleAssignment, num_microbatches: int, work: Int64Array, cost: Cost) -> ModuleAssignment:
    """The items of each microbatch over all replicas of their unit, so that the largest load is small."""
    replica = items.replica.copy()
    for microbatch in range(num_microbatches):
        inside = np.flatnonzero(items.microbatch == microbatch)
        replica[inside] = assign(work[inside], items.num_replicas, cost).ranks
    group = replica.astype(np.int64) * num_microbatches + items.microbatch
    return replace(items, replica=replica, ordered=partial(positions_in, group, items.example))
