"""Decides each microbatch: one Assignment a phase, from lengths alone (OrchMLLM, arXiv:2503.23830, sections 5.1, 6).

The items of the backbone are whole interleaved sequences; those of an encoder are its images or clips. A phase is
balanced on the work of its items: their operations, say, or their lengths (`balance.ItemWork`). Where all phases are
balanced, the fastest method is chosen. A decision depends on lengths and constants alone, and compares times as
integers. So every rank that sees the same lengths makes the same decision by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from motet.assign.step import StepAssignment, joined
from motet.balance import (
    METHODS,
    Choice,
    Cost,
    ItemWork,
    LengthWork,
    Method,
    Packed,
    Padded,
    PhaseCosts,
    Split,
    StepCosts,
    StepTimes,
    choose,
    score,
)
from motet.balance.phases import Held, assign_apart, assign_backbone
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.cluster import Link
from motet.core.cuts import CutRows, ItemCuts
from motet.core.exchange import Communicator, Network
from motet.core.nodes import RanksPerNode
from motet.core.sight import CAUSAL, Sight
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule import PlannedProgram

PhaseWork = Mapping[str, Int64Array]
_LENGTHS = LengthWork()
_NO_LINK = Network(Link(math.inf, 0.0), Link(math.inf, 0.0))
"""For an Orchestrator that predicts nothing."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What an Orchestrator decided for one microbatch. All fields but `decide_s` are the same on all ranks.

    assignments: per phase, the placement that is used.
    before:      per phase, the placement without balancing: every item on its example's home rank.
    costs:       how the work of a rank's items adds up to the loads in `assignments` and `before`.
    work:        per phase, the work of each item, int64 [num_items].
    decide_s:    seconds that the decision took on this rank.
    method:      "joint", "mixed", "per_phase" or "split" (see `motet.balance.choose`) if all phases are balanced; else
                 "some" or "off". "off" too where balancing would exceed the groups of a step
                 (`Orchestrator.within_groups`).
    why:         the reason for the method, a sentence with figures; empty if nothing was predicted.
    predicted_s: seconds of the microbatch by method; empty if nothing was predicted.
    communicator: how its exchanges are executed. ranks_per_node: of the ranks that exchange, as of `Network`.
    program:     the Program of its step, where that is decided by step (`Plan.filling`); None: that of its Plan.
    cuts:        the sequences that several ranks share, which `assignments` have on the rank with most of their rows;
                 None: all are whole.
    item_cuts:   encoder -> the same of its items, where some are shared.
    sharing:     encoder -> how many ranks, one after the other, share its items; left out: all ranks do, and so they do
                 where some item is on more ranks (`is_over_all`).
    cut_rows:    encoder -> between which rows its items are cut; left out: those that they become.
    merges:      whether the rank with most of a sequence's rows merges it whole, by a merge of the user's own.
    sight:       what rows of sequences see, by which the rows of shared ones are dealt out.
    lacking_bytes, fits_whole: as of `motet.balance.Choice`.

    Example:
        >>> from motet.balance import Packed
        >>> lengths = BatchLengths(np.array([6, 5, 1, 2]), np.ones(4, int), np.array([0, 0, 1, 1], np.int32), {})
        >>> decision = Orchestrator({"backbone": Packed()}, num_ranks=2, balanced=["backbone"]).decide(lengths)
        >>> decision.method, decision.before["backbone"].loads.tolist(), decision.backbone.loads.tolist()
        ('per_phase', [11, 3], [7, 7])
    """

    assignments: dict[str, Assignment]
    before: dict[str, Assignment]
    costs: PhaseCosts
    work: PhaseWork
    decide_s: float
    method: str
    why: str = ""
    predicted_s: dict[str, float] = field(default_factory=dict)
    communicator: Communicator = "all_to_all"
    program: PlannedProgram | None = None
    cuts: ItemCuts | None = None
    item_cuts: Mapping[str, ItemCuts] = field(default_factory=dict)
    sharing: Mapping[str, int] = field(default_factory=dict)
    cut_rows: Mapping[str, CutRows] = field(default_factory=dict)
    merges: bool = False
    sight: Sight = CAUSAL
    lacking_bytes: int = 0
    fits_whole: bool = True
    ranks_per_node: RanksPerNode | None = None

    def cuts_of(self, phase: str) -> ItemCuts | None:
        """The items of a phase that several ranks share; None: all are whole."""
        return self.cuts if phase == BACKBONE else self.item_cuts.get(phase)

    def is_over_all(self, phase: str) -> bool:
        """Whether all ranks of a phase share its items where any do: some item is on more of them than `sharing`."""
        cuts, num_ranks = self.cuts_of(phase), self.sharing.get(phase)
        return num_ranks is None or (cuts is not None and bool(cuts.is_across(num_ranks).any()))

    @property
    def shares_items(self) -> bool:
        """Whether several ranks share an item of any phase."""
        return self.cuts is not None or bool(self.item_cuts)

    def whole_items_on(self, phase: str, rank: int) -> Int64Array:
        """The items of a phase that a rank computes whole, in their order, int64 [n]."""
        own, cuts = self.assignments[phase].on_rank(rank), self.cuts_of(phase)
        return own if cuts is None else cuts.whole_among(own)

    def items_on(self, phase: str, rank: int) -> Int64Array:
        """The items of a phase that a rank computes, the whole ones in their order, then those of which it has rows."""
        whole, cuts = self.whole_items_on(phase, rank), self.cuts_of(phase)
        return whole if cuts is None else np.concatenate([whole, cuts.on_rank(rank)])

    @property
    def backbone(self) -> Assignment:
        """The placement of the backbone's sequences."""
        return self.assignments[BACKBONE]

    def whole_on(self, rank: int) -> Int64Array:
        """The examples whose whole sequences a rank runs, in their order, int64 [n]."""
        return self.whole_items_on(BACKBONE, rank)

    def sequences_on(self, rank: int) -> Int64Array:
        """The examples whose sequences a rank runs, the whole ones in their order, then those of which it has rows.

        A rank without any counts as one of those that share the first, of which it has no row: it meets the others.
        """
        own = self.items_on(BACKBONE, rank)
        return own if len(own) or self.cuts is None else self.cuts.items[:1]

    def keep(self, kept: BoolArray, lengths: BatchLengths) -> Decision:
        """The decision without the examples that could not be loaded. Other items keep their rank and their order.

        kept:    bool [num_examples], the same on all ranks.
        lengths: the lengths of all examples, from which the decision was made.
        """
        if kept.all():
            return self
        kept_items = {phase: kept[lengths.of(phase).example] for phase in self.work}
        work = {phase: self.work[phase][mask] for phase, mask in kept_items.items()}

        cuts = {
            phase: left
            for phase in self.work
            if (own := self.cuts_of(phase)) is not None and (left := own.keep(kept_items[phase])) is not None
        }

        def remaining(phase: str, assignment: Assignment) -> Assignment:
            mask = kept_items[phase]
            renumbered = np.cumsum(mask) - 1
            order = renumbered[assignment.items[mask[assignment.items]]]
            return _placed(assignment.ranks[mask], order, work[phase], assignment.num_ranks, self.costs.costs[phase])

        assignments = {phase: remaining(phase, assignment) for phase, assignment in self.assignments.items()}
        for phase, own in cuts.items():
            assignments[phase] = with_cut_loads(assignments[phase], own, self.costs.costs[phase].alone(work[phase]))
        return replace(
            self,
            assignments=assignments,
            cuts=cuts.pop(BACKBONE, None),
            item_cuts=cuts,
            before={phase: remaining(phase, assignment) for phase, assignment in self.before.items()},
            work=work,
        )


def joined_decisions(
    lengths: Sequence[BatchLengths],
    decisions: Sequence[Decision],
    names: Sequence[str] = (),
    methods: tuple[str, ...] = (),
) -> StepAssignment:
    """The StepAssignment of the decisions of a step's microbatches, and of the lengths of each.

    names: its modules, in their order; (): as the first decision has them. methods: as of `StepAssignment`.
    """
    names = names or tuple(decisions[0].assignments if decisions else ())
    assignments = [{name: decision.assignments[name] for name in names} for decision in decisions]
    cuts = [{name: decision.cuts_of(name) for name in names} for decision in decisions]
    return joined(lengths, assignments, methods, cuts)


class Orchestrator:
    """Turns the lengths of a microbatch into a Decision.

    costs:    per phase, backbone included, how the work of a rank's items adds up to its load.
    work:     the work of an item; its length by default. `motet.cost.operations.Operations` counts operations.
    balanced: the phases to balance. A backbone that is not balanced runs every example on its home rank. An encoder
              that is not balanced runs on the rank of its item's sequence, so that its outputs need not move.
    times:    predicts the seconds of each method, if all phases are balanced. None: each phase is balanced by itself.
    methods:  the methods to choose from, if there are `times`.
    defers:   whether `decide_step` (assign/whole_step.py) may give an example another microbatch, if there are `times`.
    ranks_per_node: None: that of the link of `times`; without times, all ranks share a node.
    node_wise, communicator: as in `Network`. None: those of the link of `times`; without times, the defaults there.
    sight:    as of `Decision`.

    Example:
        >>> from motet.balance import Packed
        >>> lengths = BatchLengths(np.array([6, 5, 1, 2]), np.ones(4, int), np.array([0, 0, 1, 1], np.int32), {})
        >>> orchestrator = Orchestrator({"backbone": Packed()}, num_ranks=2, balanced=["backbone"])
        >>> orchestrator.decide(lengths).backbone.ranks.tolist()
        [0, 1, 0, 1]
    """

    def __init__(
        self,
        costs: Mapping[str, Cost],
        num_ranks: int,
        balanced: Iterable[str],
        *,
        work: ItemWork = _LENGTHS,
        times: StepTimes | None = None,
        methods: Sequence[Method] = METHODS,
        defers: bool = False,
        ranks_per_node: RanksPerNode | None = None,
        node_wise: bool | None = None,
        communicator: Communicator | None = None,
        sight: Sight = CAUSAL,
    ) -> None:
        if BACKBONE not in costs:
            raise ValueError(f"costs need an entry for {BACKBONE!r}")
        self.costs = PhaseCosts(dict(costs), work) if times is None else StepCosts(dict(costs), work, times, defers)
        self.num_ranks = num_ranks
        self.balanced = frozenset(balanced)
        self.methods = tuple(methods)
        self.sight = sight
        network = _NO_LINK if times is None else times.network
        self.ranks_per_node = network.ranks_per_node if ranks_per_node is None else ranks_per_node
        self.node_wise = network.node_wise if node_wise is None else node_wise
        self.communicator: Communicator = communicator or network.communicator
        if unknown := self.balanced - costs.keys():
            raise ValueError(f"balanced phases without a cost: {sorted(unknown)}")

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoder phases, in the order in which costs were given."""
        return self.costs.names[1:]

    def decide(self, lengths: BatchLengths, input_bytes: Int64Array | None = None) -> Decision:
        """Assign the items of every phase. `lengths.items` must have a column, possibly empty, for every encoder phase.

        input_bytes: int64 [num_examples], the size of what an example's home rank has loaded of it; little of it then
                     leaves its node. None: every rank can load any example.

        Raises ValueError if the phases of the costs and of the lengths differ.
        """
        start_s = time.perf_counter()
        self.check(lengths)
        work = self.costs.work(lengths)
        if not self.node_wise:
            input_bytes = None
        if isinstance(self.costs, StepCosts) and self.compares:
            phases, link = self.costs.phases(lengths, work), self.costs.times.link
            choice = choose(
                phases,
                self.num_ranks,
                link,
                methods=self.methods,
                home=lengths.home,
                input_bytes=input_bytes,
                room_bytes=self.costs.times.room_bytes,
            )
            return self.decision_of(choice, work, start_s)
        before = self._before(lengths, work)
        held = None if input_bytes is None else Held(lengths.home, input_bytes, self.ranks_per_node)
        assignments = self._balance_each(lengths, work, before[BACKBONE], held)
        method = "per_phase" if self.balanced == self.costs.costs.keys() else "some" if self.balanced else "off"
        decide_s = time.perf_counter() - start_s
        return Decision(
            assignments,
            before,
            self.costs,
            work,
            decide_s,
            method,
            communicator=self.communicator,
            ranks_per_node=self.ranks_per_node,
        )

    def within_groups(self, decision: Decision, lengths: BatchLengths) -> Decision:
        """The decision for a microbatch of groups, a rank; the groups as they are if it gives any rank more than them.

        More is a longer sum of a phase, without or with its padding, than that of the fullest group. So no microbatch
        of a run is larger than the largest group, whatever is balanced.
        """
        for phase, kind in [(name, kind) for name in self.costs.names for kind in (Packed(), self._kind(name))]:
            most_before, most = (
                int(score(placed.ranks, lengths.of(phase).length, self.num_ranks, kind).loads.max())
                for placed in (decision.before[phase], decision.assignments[phase])
            )
            if most > most_before:
                why = (
                    f"off: groups stay as they are, because by {decision.method} a rank would have {most:,} of "
                    f"{phase}, and the fullest group has {most_before:,}."
                )
                return replace(decision, assignments=decision.before, method="off", why=why)
        return decision

    def _kind(self, phase: str) -> Packed | Padded:
        return Padded() if isinstance(self.costs.costs[phase], Padded) else Packed()

    @property
    def compares(self) -> bool:
        """Whether methods are compared by predicted time: it takes times, and that all phases are balanced."""
        return isinstance(self.costs, StepCosts) and self.balanced == self.costs.costs.keys()

    @property
    def defers(self) -> bool:
        """Whether an example may change its microbatch: the costs say so, and methods are compared."""
        return isinstance(self.costs, StepCosts) and self.costs.defers and self.compares

    @property
    def of_whole_items(self) -> Orchestrator:
        """The same, which cuts no sequence: for items that go to one rank each."""
        if "split" not in self.methods:
            return self
        uncut = copy(self)
        uncut.methods = tuple(method for method in self.methods if method != "split") or METHODS
        return uncut

    def check(self, lengths: BatchLengths) -> None:
        """Raise ValueError if the phases of the costs and of the lengths differ, and as `PhaseCosts.check_segments`."""
        if missing := set(self.encoders) ^ lengths.items.keys():
            raise ValueError(f"phases of costs and of lengths differ in {sorted(missing)}")
        self.costs.check_segments(lengths)

    def _before(self, lengths: BatchLengths, work: PhaseWork) -> dict[str, Assignment]:
        """The placement of each phase without balancing."""
        return {
            phase: score(_home(phase, lengths), work[phase], self.num_ranks, cost)
            for phase, cost in self.costs.costs.items()
        }

    def decision_of(self, choice: Choice, work: PhaseWork, start_s: float) -> Decision:
        """The Decision that a Choice, made with `home`, stands for. start_s: when deciding began."""
        assignments = dict(zip(self.costs.names, choice.assignments, strict=True))
        before = dict(zip(self.costs.names, choice.before, strict=True))
        decide_s = time.perf_counter() - start_s
        return Decision(
            assignments,
            before,
            self.costs,
            work,
            decide_s,
            str(choice.method),
            choice.why,
            choice.predicted_s,
            self.communicator,
            cuts=cuts_in(choice.fragments),
            item_cuts={phase: cuts for phase, cut in choice.cut_items.items() if (cuts := cuts_in(cut)) is not None},
            cut_rows=self.costs.times.cut_rows if isinstance(self.costs, StepCosts) else {},
            merges=isinstance(self.costs, StepCosts) and self.costs.times.merges,
            sight=self.sight,
            lacking_bytes=choice.lacking_bytes,
            fits_whole=choice.fits_whole,
            ranks_per_node=self.ranks_per_node,
        )

    def _balance_each(
        self, lengths: BatchLengths, work: PhaseWork, backbone: Assignment, held: Held | None
    ) -> dict[str, Assignment]:
        """Balance each phase by itself. backbone: the backbone's placement if it is not balanced."""
        costs = self.costs.costs
        if BACKBONE in self.balanced:
            backbone = assign_backbone(work[BACKBONE], costs[BACKBONE], self.num_ranks, held)
        assignments = {BACKBONE: backbone}
        for phase in self.encoders:
            example, cost = lengths.items[phase].example, costs[phase]
            if phase in self.balanced:
                assignments[phase] = assign_apart(
                    work[phase],
                    cost,
                    example,
                    backbone,
                    output_bytes=lengths.items[phase].num_tokens,
                    ranks_per_node=self.ranks_per_node if self.node_wise else None,
                )
            else:
                ranks, order = backbone.follow(example)
                assignments[phase] = _placed(ranks, order, work[phase], self.num_ranks, cost)
        return assignments


def cuts_in(fragments: Split | None) -> ItemCuts | None:
    """The items that a Split cuts; None if it cuts none."""
    if fragments is None or not fragments.num_cut:
        return None
    shared = fragments.num_parts > 1
    item, begin, end = (column[shared] for column in (fragments.item, fragments.begin, fragments.end))
    return ItemCuts(item, fragments.assignment.ranks[shared], begin, end, fragments.units[item])


def with_cut_loads(placed: Assignment, cuts: ItemCuts, weights: Int64Array) -> Assignment:
    """The placement with the loads of the fragments of cut items, and a bound that holds for these.

    weights: the cost of each whole item, int64 [num_items].
    """
    loads = np.zeros(placed.num_ranks, dtype=np.int64)
    whole = cuts.whole_among(np.arange(placed.num_items))
    np.add.at(loads, placed.ranks[whole], weights[whole])
    np.add.at(loads, cuts.rank, cuts.share_of(weights))
    return replace(placed, loads=loads, bound=-(-int(weights.sum()) // placed.num_ranks))


def _home(phase: str, lengths: BatchLengths) -> Int32Array:
    """The home rank of each item of a phase, int32 [num_items]."""
    return lengths.home[lengths.of(phase).example]


def _placed(ranks: Int32Array, order: Int64Array, work: Int64Array, num_ranks: int, cost: Cost) -> Assignment:
    """The Assignment with the given ranks and order of items. Loads do not depend on the order."""
    return replace(score(ranks, work, num_ranks, cost), items=order)
