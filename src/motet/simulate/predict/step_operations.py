"""A pipeline Plan's Program as a StepGraph, and what its operations take in a step: what `simulate` simulates, for all
islands at once and without a Timeline, so that orders of microbatches can be compared in microseconds.

An operation is an action, or several that take place together (`ActionIndex.operation`). It waits for what its actions
wait for, and for the actions before them in their streams. Its seconds are a sum of columns of StageTimes, each times a
share, plus what does not depend on the microbatch: collectives and the optimizer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np

from motet.assign.step import ModuleAssignment, StepAssignment
from motet.balance import island_makespans
from motet.balance.step_graph import StepGraph, gaps_of, graph_of_needs
from motet.core.arrays import BoolArray, Float64Array, Int32Array, Int64Array, rows_of_runs
from motet.core.errors import ArgumentError
from motet.core.exchange import NS_PER_S
from motet.core.plan import Plan
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.memory import stage_layers
from motet.cost.model import CostModel
from motet.schedule.coordinates import replica_of
from motet.schedule.dependencies import PARTNERS
from motet.schedule.from_plan import PlannedProgram
from motet.schedule.generators.dag import distances
from motet.schedule.program import Kind
from motet.simulate.engine.action_seconds import action_seconds
from motet.simulate.engine.meetings import MetPasses
from motet.simulate.engine.simulate import Prepared, run_copies
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.engine.streams import COMPUTE, STREAMS, TENSOR
from motet.simulate.engine.table import CODES, KINDS, PASSES
from motet.simulate.engine.turns import NO_TURN, turns
from motet.simulate.predict.collectives import Collectives
from motet.simulate.predict.met_passes import met_passes
from motet.simulate.predict.program_times import StageParts, constant_times, parts_of_passes
from motet.simulate.predict.stage_pricing import Pricing, StagePrices
from motet.simulate.predict.traffic import Traffic, sent_key

_OF_STAGE = {f"{name}_s": name for name in StagePrices._fields if name != "held"}
_COLUMNS = (*_OF_STAGE, "send_s", "return_s")
"""Columns of StageTimes, in their order; the last two are of edges."""
_SENT_KIND = np.array([CODES[PARTNERS[kind]] if kind in (Kind.RECV_F, Kind.RECV_B) else CODES[kind] for kind in KINDS])
"""The code of each kind, but of RECV that of its SEND: both take place together."""
_NONE = np.zeros((1, 1))
_GROUPS_AT_ONCE = 1 << 12
"""Groups whose seconds are added up at a time."""
_NUM_KEPT = 8
"""Assignments of which is kept what replicas run together: those that a step's candidates have."""


class StepOperations:
    """The operations of the steps of a pipeline's Plan."""

    def __init__(self, planned: PlannedProgram, cost: CostModel) -> None:
        self.planned, self.cost, self.plan = planned, cost, planned.layout.plan
        self.overlap = self.plan.cluster.device.overlaps
        self._prepared = Prepared(planned.program, whole=True)
        self._lookup = self._prepared.lookup
        nothing = _no_examples(self.plan, planned.layout.num_microbatches)
        self._empty = Pricing(self.plan, planned, nothing, cost)
        self._met = deque[tuple[StepAssignment, MetPasses | None]](maxlen=_NUM_KEPT)
        self._parts = parts_of_passes(self._empty)
        self._constants = constant_times(Collectives(self._empty))

    @cached_property
    def _pairs(self) -> tuple[Int64Array, Int64Array]:
        """Operations that wait and those that they wait for, each by the row of its first action; int64 [num_pairs]."""
        pairs = self._prepared.waits(self._stream, self.overlap)
        in_streams = np.argsort(self._held, kind="stable")
        follows = self._held[in_streams[1:]] == self._held[in_streams[:-1]]
        after = np.concatenate([pairs.dependent, in_streams[1:][follows]])
        before = np.concatenate([pairs.dependency, in_streams[:-1][follows]])
        operation = self._lookup.operation.astype(np.int64)
        return operation[after], operation[before]

    @cached_property
    def _first_rows(self) -> Int64Array:
        """The row of the first action of each operation, in an order in which each comes behind what it waits for.

        Raises ArgumentError for operations that wait for each other.
        """
        operation = self._lookup.operation
        rows = np.flatnonzero(operation == np.arange(len(operation)))
        turn = turns(len(operation), *self._pairs)
        if (turn == NO_TURN).any():
            raise ArgumentError("the program cannot run: actions wait for each other.")
        return rows[np.argsort(turn[rows], kind="stable")]

    @cached_property
    def _index(self) -> Int64Array:
        """The operation of each action, int64 [num_actions]."""
        index = np.full(len(self._lookup.table), -1, dtype=np.int64)
        index[self._first_rows] = np.arange(len(self._first_rows))
        return index[self._lookup.operation]

    @cached_property
    def _stream(self) -> Int32Array:
        """The stream of each action, as an index in STREAMS."""
        return action_seconds(self._lookup, self._times(self._parts)).stream

    @cached_property
    def _held(self) -> Int32Array:
        """The stream that each action holds, numbered over all ranks."""
        held = self._stream if self.overlap else np.where(self._stream == TENSOR, np.int32(COMPUTE), self._stream)
        held_by_rank: Int32Array = self._lookup.table.rank * np.int32(len(STREAMS)) + held
        return held_by_rank

    @cached_property
    def _alike(self) -> tuple[Int64Array, Int64Array]:
        """The first stage that takes the same seconds as each stage, and the first edge as each edge."""
        stages, layout = self.planned.stages, self.planned.layout
        layers = [Counter(stage_layers(self.plan.model, one.layers, one.recomputed)) for one in stages]
        of_edge = [sent_key(self.planned, edge) for edge in range(len(self.planned.program.edges))]
        messages = [Counter[tuple[object, ...]]() for _ in stages]  # For these the rank of a stage may compute.
        for edge, ends in enumerate(self.planned.program.edges):
            if stages[ends[0]].ranks[0] != stages[ends[1]].ranks[0]:
                for end in ends:
                    messages[end][of_edge[edge]] += 1
        of_stage = [
            (
                one.unit.name,
                replica_of(layout, one, 0),
                one.num_parts,
                frozenset(counts.items()),
                frozenset(sent.items()),
            )
            for one, counts, sent in zip(stages, layers, messages)
        ]
        return _first_alike(of_stage), _first_alike(of_edge)

    @cached_property
    def _constant_s(self) -> Float64Array:
        """The seconds of each action's operation that do not depend on the microbatch, [num_actions]."""
        seconds, lookup = action_seconds(self._lookup, self._constants), self._lookup
        longest = np.zeros(len(lookup.table))
        np.maximum.at(longest, lookup.operation, seconds.held_s[:, 0])
        return longest[lookup.operation]

    @cached_property
    def _rows(self) -> tuple[Int64Array, Int64Array]:
        """The row of durations of each operation, and the operation that stands for each row.

        Operations of a row are of one kind, of stages or edges that are alike, and one of as many parts; or they take
        the same in all microbatches.
        """
        lookup, at = self._lookup, self._first_rows
        table, (alike_stage, alike_edge) = lookup.table, self._alike
        count = np.zeros(len(table), dtype=np.int64)
        for of_kind, passes in lookup.passes.items():
            rows = table.rows(of_kind)
            count[rows] = passes.count[table.stage[rows], table.microbatch[rows]]
        is_pass, is_sent = count > 0, lookup.edge >= 0
        stage = np.where(is_pass, alike_stage[table.stage], -1)
        edge = np.where(is_sent, np.append(alike_edge, -1)[lookup.edge], -1)
        kind = np.where(is_pass | is_sent, _SENT_KIND[table.kind], -1)
        part = np.where(is_pass, table.part, -1)
        constant = np.unique(self._constant_s, return_inverse=True)[1]
        keys = np.stack([kind, stage, edge, part, count, constant])[:, at]
        _, first, row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        return row.reshape(-1), first

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of a step. O(actions log actions)."""
        lookup, table = self._lookup, self._lookup.table
        microbatch = table.microbatch[self._first_rows].astype(np.int64)
        position = np.where(microbatch < 0, lookup.shape[1], microbatch)
        dependent, dependency = (self._index[rows] for rows in self._pairs)
        last = self._last_in_streams(dependent, dependency)
        dependent, dependency = dependent[last], dependency[last]
        gaps, num_last = self._gaps()
        return graph_of_needs(self._rows[0], position, dependent, dependency, gaps, num_last)

    def _last_in_streams(self, dependent: Int64Array, dependency: Int64Array) -> BoolArray:
        """Whether an operation that is waited for is the last one of its streams that its dependent waits for: those
        before it have ended when it has.
        """
        if not len(dependency):
            return np.empty(0, dtype=np.bool_)
        actions = np.argsort(self._index, kind="stable")
        first = np.searchsorted(self._index[actions], dependency)
        num = np.searchsorted(self._index[actions], dependency, side="right") - first
        pair = np.repeat(np.arange(len(dependency)), num)
        held = self._held[actions[rows_of_runs(first, num)]]
        order = np.lexsort((dependency[pair], held, dependent[pair]))
        keys, needed = np.stack([dependent[pair], held])[:, order], dependency[pair][order]
        begins = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
        ends = np.append(np.flatnonzero(begins)[1:], len(needed)) - 1
        is_last = np.ones(len(dependency), dtype=np.bool_)
        is_last[pair[order][needed != needed[ends][np.cumsum(begins) - 1]]] = False
        return is_last

    def _gaps(self) -> tuple[Int32Array, int]:
        """`gaps` and `num_last` of the graph. The first rank is that of the stage farthest from the end that has a
        backward pass of every microbatch.
        """
        lookup, program = self._lookup, self.planned.program
        forward = lookup.passes[Kind.F].first
        whole = (forward >= 0).all(axis=1)
        backward = np.full_like(forward, -1)
        for kind in (Kind.B, Kind.I):
            if kind in lookup.passes:
                backward = np.maximum(backward, lookup.passes[kind].first)
        candidates = np.flatnonzero(whole & (backward >= 0).all(axis=1))
        candidates = candidates if len(candidates) else np.flatnonzero(whole)
        to_end = np.array(distances(program.num_stages, program.edges))
        first = int(candidates[np.argmax(to_end[candidates])])
        ranks = np.array([stage.rank for stage in program.stages])
        beside = np.flatnonzero((ranks == ranks[first]) & whole)
        forwards, backwards = (
            np.sort(self._index[rows[rows >= 0]]) for rows in (forward[beside].ravel(), backward[beside].ravel())
        )
        on_stream = self._held == self._held[forward[first, 0]]
        passes = np.sort(self._index[np.flatnonzero(on_stream)])
        own = self._index[backward[first]] if (backward[first] >= 0).all() else np.empty(0, dtype=np.int64)
        num_last = max(int((own > forwards[-1]).sum()) - 1, 0)
        return gaps_of(self._index[forward[first]], forwards, backwards, passes), num_last

    def durations(self, assignment: StepAssignment) -> Int64Array:
        """Nanoseconds of the rows of the graph, int64 [num_islands * num_microbatches, num_rows], island by island."""
        pricing = Pricing(self.plan, self.planned, assignment, self.cost, like=self._empty)
        self._met.append((assignment, met_passes(pricing, range(pricing.num_islands))))
        if self._parts != (parts := parts_of_passes(pricing)):
            self._parts = parts
            self.__dict__.pop("_shares", None)
        constant, terms = self._shares[0], self._terms(pricing)
        count = self.planned.layout.num_islands * assignment.num_microbatches
        durations: Int64Array = np.empty((count, len(constant)), dtype=np.int64)
        # Some groups at a time, so that what is added up stays in the caches.
        seconds, term = np.empty((len(constant), _GROUPS_AT_ONCE)), np.empty(_GROUPS_AT_ONCE)
        for first in range(0, count, _GROUPS_AT_ONCE):
            groups = slice(first, min(first + _GROUPS_AT_ONCE, count))
            part, added = seconds[:, : groups.stop - first], term[: groups.stop - first]
            for of_row, constant_s, of_groups in zip(part, constant.tolist(), terms):
                of_row.fill(constant_s)
                for share, column in of_groups:
                    of_row += np.multiply(column[groups], share, out=added)
            part *= NS_PER_S
            durations[groups] = np.rint(part, out=part).T
        return durations

    def _terms(self, pricing: Pricing) -> list[list[tuple[float, Float64Array]]]:
        """What is added up to the seconds of each row: shares of columns [num_islands * num_microbatches]."""
        (_, shares), (stage, edge) = self._shares, self._columns
        islands, traffic, stages = range(self.planned.layout.num_islands), Traffic(pricing), self.planned.stages
        prices = {number: pricing.islands(stages[number]) for number in set(stage[stage >= 0].tolist())}
        if traffic.has_calls:
            forward, backward = traffic.calls_s(islands), traffic.calls_s(islands, gradient=True)
            prices = {
                number: one._replace(forward=one.forward + forward[:, number], input=one.input + backward[:, number])
                for number, one in prices.items()
            }
        known: dict[tuple[str, int], Float64Array] = {}

        def column(name: str, row: int) -> Float64Array:
            key = name, int((stage if name in _OF_STAGE else edge)[row])
            if key not in known:
                if name in _OF_STAGE:
                    seconds = getattr(prices[key[1]], _OF_STAGE[name])
                else:
                    seconds = traffic.edge_s(key[1], islands, gradient=name == "return_s")
                known[key] = np.broadcast_to(seconds, (len(islands), pricing.assignment.num_microbatches)).ravel()
            return known[key]

        return [
            [(float(share[row]), column(name, row)) for name, share in shares.items() if share[row]]
            for row in range(len(stage))
        ]

    def together(self, assignment: StepAssignment, durations: Int64Array, groups: Int64Array) -> Int64Array:
        """Nanoseconds of each island's step, int64 [num_islands], where replicas run the microbatches of which they
        share sequences together: in all islands these are at the same positions.

        assignment: of the groups, which are numbered island by island; one of the last whose durations were asked for.
        durations:  these.
        groups:     int64 [num_islands, num_microbatches], the group at each position.
        """
        meeting = next(met for known, met in reversed(self._met) if known is assignment)
        if meeting is None:
            return island_makespans(self.graph, durations, groups)
        placed = np.concatenate([groups, groups[:, :1]], axis=1)  # Behind them what serves the whole step.
        row, microbatch = self._rows[0][self._index], self._lookup.table.microbatch
        taken = durations[placed[:, microbatch], row].astype(np.float64)
        meeting = meeting.in_order(groups)
        _, ends = run_copies(self._prepared, self._stream, taken, self.overlap, meeting)
        island_ns: Int64Array = np.rint(ends.max(axis=1)).astype(np.int64)
        return island_ns

    @cached_property
    def _columns(self) -> tuple[Int64Array, Int64Array]:
        """The stage of each row whose passes it is of, and the edge whose messages it is of; -1: of none."""
        lookup, at = self._lookup, self._first_rows[self._rows[1]]
        is_pass = np.isin(lookup.table.kind[at], [CODES[kind] for kind in PASSES])
        return np.where(is_pass, lookup.table.stage[at], -1), lookup.edge[at].astype(np.int64)

    @cached_property
    def rows_of_ranks(self) -> Int64Array:
        """How often a rank computes each row in a microbatch, int64 [num_ranks, num_rows]; no encoders in bubbles."""
        lookup = self._lookup
        is_pass = np.isin(lookup.table.kind, [CODES[kind] for kind in PASSES]) & (lookup.table.microbatch == 0)
        actions = np.flatnonzero(is_pass & (lookup.table.stage < len(self.planned.layout.stages)))
        counts = np.zeros((self.planned.program.num_ranks, len(self._rows[1])), dtype=np.int64)
        np.add.at(counts, (lookup.table.rank[actions], self._rows[0][self._index[actions]]), 1)
        return counts

    @cached_property
    def _shares(self) -> tuple[Float64Array, dict[str, Float64Array]]:
        """Of each row: its constant seconds, and its share of each column of StageTimes, by name."""
        at, num, columns = self._first_rows[self._rows[1]], len(_COLUMNS), {}
        # As many islands as columns; in each of them one column is 1.
        for number, name in enumerate(_COLUMNS):
            count = self._lookup.shape[0] if name in _OF_STAGE else len(self._lookup.sources)
            columns[name] = np.repeat(np.arange(num) == number, count).astype(np.float64)[:, None]
        found = action_seconds(self._lookup, self._times(self._parts, **columns), num_copies=num)
        return self._constant_s[at], dict(zip(_COLUMNS, (found.held_s + found.tensor_s)[at].T))

    def _times(self, parts: tuple[StageParts, StageParts], **columns: Float64Array) -> StageTimes:
        """StageTimes that are 0, but for the given columns."""
        forward_s, input_s, weight_s, recompute_s, forward_tensor_s, backward_tensor_s, send_s, return_s = (
            columns.get(name, _NONE) for name in _COLUMNS
        )
        return StageTimes(
            forward_s,
            input_s,
            weight_s,
            recompute_s,
            forward_tensor_s,
            backward_tensor_s,
            send_s,
            return_s,
            forward_parts=parts[0],
            backward_parts=parts[1],
        )


def _first_alike(keys: Sequence[Hashable]) -> Int64Array:
    """For each key, the number of the first one that equals it."""
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(key, number) for number, key in enumerate(keys)], dtype=np.int64)


def _no_examples(plan: Plan, num_microbatches: int) -> StepAssignment:
    """The assignment of a step without examples."""
    none, nowhere = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    modules = {
        module.name: ModuleAssignment(none, none, none, nowhere, nowhere, none, 1) for module in plan.model.modules
    }
    batch = BatchLengths(none, none, nowhere, {name: ItemLengths(none, none, none) for name in modules})
    return StepAssignment(batch, num_microbatches, modules)
