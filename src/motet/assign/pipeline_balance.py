"""`Plan.balance` in a pipeline: whole microbatches over the backbone's replicas, items over those of encoder units.

Colocated phases move rows to be balanced. Here they move in any case, from unit to unit. So "joint" and "per_phase"
differ by which rows may go where:

- "joint": the microbatches that replicas of the backbone take are dealt out by the work of all modules. Items follow
  their examples, as without balancing, and islands stay apart.
- "split": as "joint", but for the longest sequences, as far as no way of dealing out whole ones is as even. They are
  cut over several replicas, and the whole ones of their microbatch fill up the others (`item_shares.py`), whatever
  groups they were in. Encoders' items follow the largest fragment of their sequence; those of cut sequences that
  dominate their microbatch are dealt out over replicas and cut too, of encoders in the backbone's unit. Replicas wait
  for each other in such microbatches, so these come first. A Plan's `order` may deal microbatches out in the place of
  "joint" (`ordering.py`); the same sequences are cut. Where replicas of an encoder's unit with ranks of its own can
  share items (`plan_units.cuts_over_replicas`), items are dealt out as by "per_phase", and where those that dominate
  their microbatch leave replicas uneven, they are cut over these, each over as many as it needs.
- "per_phase", and "auto", which is the same as it is never slower: items of an encoder with ranks of its own go to any
  replica of its unit. They are even in each microbatch (OrchMLLM section 5). Microbatches are dealt out by the work of
  the modules on the backbone's ranks.

Work is counted in operations, whatever a recipe states: simulation and training decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from motet.assign.balancing import policies_of
from motet.assign.item_shares import FULLEST, ItemShares, item_shares, joined_cuts
from motet.assign.pipeline import Batching, assign_batching, positions_in
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.balance import Cost, assign
from motet.balance.costs import cost_of
from motet.core.arrays import BoolArray, Int64Array
from motet.core.cuts import ItemCuts
from motet.core.plan import Plan
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.operations import Operations
from motet.schedule.plan_units import (
    backbone_unit,
    cuts_beside_sequences,
    cuts_over_replicas,
    cuts_sequences,
    joins_all_replicas,
    on_backbone_ranks,
    recomputed_in,
    shares_items,
)

EXCHANGED = 0.15
"""What a microbatch in which sequences, or items, are cut takes beside its work, as a share of it, for exchanges and
shorter kernels: about what `benchmarks/step_time.py --cut` measures."""


def assign_balanced(plan: Plan, batch: BatchLengths, given: Batching) -> StepAssignment:
    """The assignment of a pipeline's step whose microbatches and items are balanced. given: the batching without.

    Raises UserError as `policies_of` does. O(items log items), and `assign` for each encoder and microbatch.
    """
    policies_of(plan.model, plan.policy)  # It raises also where no policy matters.
    work = item_work(plan, batch)
    if plan.balance == "split":
        dealt, cut = dealt_with_cuts(plan, batch, given, work)
        return assign_cut(plan, batch, dealt, work, cut)
    step = assign_batching(plan, batch, dealt_evenly(plan, batch, given, _dealt_by(plan, work)))
    modules = step.modules | _over_replicas(plan, step, work)
    return replace(step, modules=modules, methods=_methods(plan, step))


def _dealt_by(plan: Plan, work: Mapping[str, Int64Array]) -> Mapping[str, Int64Array]:
    """The work by which microbatches are dealt out over replicas of the backbone: that of all modules, or of those on
    its ranks where items of the others go to any replica of their unit. work: as of `item_work`.
    """
    if not _shared_modules(plan):
        return work
    here = on_backbone_ranks(plan)
    return {name: of_items for name, of_items in work.items() if name in here}


def _shared_modules(plan: Plan) -> list[str]:
    """The modules whose items go to any replica of their unit."""
    names = [module.name for module in plan.model.modules]
    return [name for name in names if joins_all_replicas(plan) and shares_items(plan, name)]


def _over_replicas(plan: Plan, step: StepAssignment, work: Mapping[str, Int64Array]) -> dict[str, ModuleAssignment]:
    """The items of such modules over all replicas of their unit, some of them cut where the Plan cuts."""
    policies, balanced = policies_of(plan.model, plan.policy), {}
    for name in _shared_modules(plan):
        of_plan = step.modules[name], step.num_microbatches, work[name], cost_of(policies[name])
        balanced[name] = _balanced(*of_plan, plan.model.module(name) if cuts_over_replicas(plan, name) else None)
    return balanced


def item_work(plan: Plan, batch: BatchLengths) -> dict[str, Int64Array]:
    """Operations of each item of each module, int64 [num_items]."""
    return Operations(plan.model, recomputed_in(plan))(batch)


def assign_cut(
    plan: Plan, batch: BatchLengths, dealt: Batching, work: Mapping[str, Int64Array], cut: Int64Array
) -> StepAssignment:
    """The assignment of a step whose microbatches are dealt out, with sequences that are cut over replicas of the
    backbone. Over which replicas depends on which examples share a microbatch, and on nothing else.

    work: as of `item_work`. cut: the sequences that need it (`dealt_with_cuts`); of their microbatches, those that are
    more than a replica's share are cut.
    """
    dealt, cuts = _cut(plan, batch, dealt, work[BACKBONE], cut)
    step = assign_batching(plan, batch, dealt)
    modules = {**step.modules, BACKBONE: replace(step.modules[BACKBONE], cuts=cuts)}
    if cuts is not None:
        for name in (name for name in modules if cuts_beside_sequences(plan, name)):
            modules[name] = _with_cut_items(modules[name], plan.model.module(name), cuts.items, work[name])
    modules |= _over_replicas(plan, step, work)
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
        shares = _cut_items(items, own, work, module)
        replica[own] = shares.ranks
        position[inside] = positions_in(replica[inside].astype(np.int64), items.example[inside])
        if shares.cuts is not None:
            parts.append((shares.cuts, own, 0))
    return replace(items, replica=replica, ordered=position, cuts=joined_cuts(parts, position))


def _cut_items(items: ModuleAssignment, own: Int64Array, work: Int64Array, module: Module) -> ItemShares:
    """Some items of an encoder on all replicas, which share those that dominate. own: int64 [n]. work: of all items."""
    rows = module.cut_rows.num_rows(items.num_tokens[own], items.length[own])
    return item_shares(work[own], rows, items.num_replicas, can_cut=True, tile_rows=module.tile_rows)


def _methods(plan: Plan, step: StepAssignment) -> tuple[str, ...]:
    return (plan.balance,) * step.num_microbatches


def dealt_evenly(plan: Plan, batch: BatchLengths, given: Batching, work: Mapping[str, Int64Array]) -> Batching:
    """The batching that gives each replica of the backbone equally many of the given microbatches, of even work.

    work: of the modules that count, int64 [num_items].
    """
    groups = _Groups.of(plan, batch, given, work)
    return given if groups.num_replicas == 1 else groups.batching(groups.dealt(np.zeros(len(groups.loads), dtype=bool)))


def dealt_with_cuts(
    plan: Plan, batch: BatchLengths, given: Batching, work: Mapping[str, Int64Array]
) -> tuple[Batching, Int64Array]:
    """The batching of a step in which sequences are cut over replicas, and these, int64 [num_cut].

    Tried are several numbers of the longest sequences: the fewest are cut with which the last replica takes at most
    FULLEST times what it takes with the best number. A replica of pp stages with work w in all and m in its largest
    microbatch takes (w + (pp - 1) * m) / pp, as if passes on all stages took equally long; a microbatch with a cut
    counts as EXCHANGED more.

    work: as of `item_work`.
    """
    groups, sequences = _Groups.of(plan, batch, given, _dealt_by(plan, work)), work[BACKBONE]
    longest = np.argsort(-sequences, kind="stable")
    num_long = int((sequences > groups.size * sequences.mean()).sum()) if cuts_sequences(plan) else 0
    found: list[tuple[float, Int64Array, Int64Array]] = []
    for num_cut in _numbers_to_try(min(num_long, groups.num_microbatches)):
        is_shared = np.zeros(len(groups.loads), dtype=bool)
        is_shared[groups.of_examples[longest[:num_cut]]] = True
        for beside_largest in (True, False) if num_cut else (True,):
            dealt = groups.dealt(is_shared, beside_largest=beside_largest)
            found.append((groups.longest(dealt, is_shared, backbone_unit(plan).pp), dealt, longest[:num_cut]))
    least = min(each for each, *_ in found)
    _, dealt, cut = next(one for one in found if one[0] <= FULLEST * least)
    return groups.batching(dealt), np.sort(cut)


def _numbers_to_try(most: int) -> list[int]:
    """0 to 4, 6, 8, 12, 16, 24 and so on, up to the most."""
    powers = [1 << power for power in range(most.bit_length())]
    return [0, *sorted({number for power in powers for number in (power, 3 * power // 2) if 0 < number <= most})]


@dataclass(frozen=True, eq=False)
class _Groups:
    """The examples of a step in groups, each of which is a microbatch of a replica.

    of_examples, index: int64 [num_examples], the group of each example, and its index there, of `size`.
    loads:              int64 [num_groups], in operations.
    """

    of_examples: Int64Array
    index: Int64Array
    size: int
    loads: Int64Array
    num_replicas: int

    @staticmethod
    def of(plan: Plan, batch: BatchLengths, given: Batching, work: Mapping[str, Int64Array]) -> _Groups:
        """Those of a batching. work: of the modules that count."""
        dp, size = backbone_unit(plan).dp, plan.microbatch_size
        replica, index = np.divmod(given.index, size)
        of_examples = given.microbatch * dp + replica
        loads = np.zeros(plan.batch_size // size, dtype=np.int64)
        for name, of_items in work.items():
            np.add.at(loads, of_examples[batch.of(name).example], of_items)
        return _Groups(of_examples, index, size, loads, dp)

    @property
    def num_microbatches(self) -> int:
        return len(self.loads) // self.num_replicas

    def dealt(self, is_shared: BoolArray, *, beside_largest: bool = True) -> Int64Array:
        """The replica and the microbatch of each group, int64 [2, num_groups]; a replica has equally many.

        is_shared: groups with sequences that replicas share, at most one a microbatch. They come first, each in a
                   microbatch of its own, beside the largest others, so that the sequence needs few replicas, or beside
                   the smallest. All else is dealt out evenly by load.
        """
        shared = np.flatnonzero(is_shared)
        by_load = np.argsort(-self.loads if beside_largest else self.loads, kind="stable")
        beside = by_load[~is_shared[by_load]][: len(shared) * (self.num_replicas - 1)]
        first = np.concatenate([shared, beside])
        whole = np.setdiff1d(np.arange(len(self.loads)), first)
        dealt = np.zeros((2, len(self.loads)), dtype=np.int64)
        if len(shared):
            dealt[:, first] = np.divmod(np.arange(len(first)), len(shared))
        if len(whole):
            slots = assign(self.loads[whole], self.num_replicas, equal_counts=True).slots.astype(np.int64)
            dealt[:, whole] = np.divmod(slots, self.num_microbatches - len(shared))
            dealt[1, whole] += len(shared)
        return dealt

    def longest(self, dealt: Int64Array, is_shared: BoolArray, num_stages: int) -> float:
        """Operations until the last replica is through, if those of a rank's stage are 1 / num_stages of a pass."""
        loads = np.zeros((self.num_replicas, self.num_microbatches))
        loads[*dealt] = self.loads * ~is_shared
        shared = dealt[1, is_shared]
        even = (loads[:, shared].sum(axis=0) + self.loads[is_shared]) / self.num_replicas
        loads[:, shared] = (1 + EXCHANGED) * np.maximum(even, loads[:, shared].max(axis=0))
        return float((loads.sum(axis=1) + (num_stages - 1) * loads.max(axis=1)).max())

    def batching(self, dealt: Int64Array) -> Batching:
        """The batching of groups that are dealt out."""
        replica, microbatch = dealt[:, self.of_examples]
        return Batching(microbatch, replica * self.size + self.index)


def _cut(
    plan: Plan, batch: BatchLengths, dealt: Batching, work: Int64Array, cut: Int64Array
) -> tuple[Batching, ItemCuts | None]:
    """The batching with other replicas in the microbatches of which sequences are cut, and these; None: none is.

    work: of the sequences, int64 [num_examples]. cut: the sequences to cut, as of `assign_cut`.
    """
    dp, size, parts, index = backbone_unit(plan).dp, plan.microbatch_size, [], dealt.index.copy()
    for microbatch in np.unique(dealt.microbatch[cut]).tolist():
        inside = np.flatnonzero(dealt.microbatch == microbatch)
        shares = item_shares(work[inside], batch.sequence[inside], dp, can_cut=True)
        if shares.cuts is not None:
            # Any number of examples may be on a replica, which has `size` indexes.
            num_here = np.bincount(shares.ranks, minlength=dp)[shares.ranks]
            index[inside] = shares.ranks * size + positions_in(shares.ranks, index[inside]) * size // num_here
            parts.append((shares.cuts, inside, 0))
    return Batching(dealt.microbatch, index), joined_cuts(parts, np.arange(batch.num_examples))


def _balanced(
    items: ModuleAssignment, num_microbatches: int, work: Int64Array, cost: Cost, cut: Module | None
) -> ModuleAssignment:
    """The items of each microbatch over all replicas of their unit, so that the largest load is small.

    cut: the encoder, if replicas share items that are more than a replica's share of their microbatch, where that is
         faster with what they exchange; None: they do not.
    """
    replica, num, parts = items.replica.copy(), items.num_replicas, []
    for microbatch in range(num_microbatches):
        inside = np.flatnonzero(items.microbatch == microbatch)
        whole = assign(work[inside], num, cost)
        replica[inside] = whole.ranks
        if cut is not None and whole.loads.max() * num > (1 + EXCHANGED) * work[inside].sum():
            shares = _cut_items(items, inside, work, cut)
            replica[inside] = shares.ranks
            if shares.cuts is not None:
                parts.append((shares.cuts, inside, 0))
    group = replica.astype(np.int64) * num_microbatches + items.microbatch
    cuts = joined_cuts(parts, np.arange(len(replica)))
    return replace(items, replica=replica, ordered=partial(positions_in, group, items.example), cuts=cuts)
