"""Which replica and microbatch of a Plan computes which items of a batch: the Assignment that a prediction is made for.

In a pipeline, examples come in their order, unless the Plan has another (`order.py`): microbatch by microbatch, and of
each an equal part to every replica of a unit (MMScale section 4.2). Colocated phases (`data_parallel`) are balanced as
training balances them (`balancing.py`), by `motet.balance.choose`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.balance import METHODS, Choice, Method, StepCosts, choose
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError, UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, Workload, home_ranks
from motet.schedule.fit import colocated_units
from motet.schedule.layout import num_microbatches
from motet.schedule.passes import Presence
from motet.simulate.balancing import Balancing, by_operations

Count = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlacedItems:
    """The items of one module, ordered by example: columns [num_items].

    example: int64. length: int64, what the module computes on. num_tokens: int64, rows in the backbone's sequence.
    replica: int32, one of num_replicas: of the module's unit, or, of encoders in bubbles, of the backbone on whose
    ranks they run. microbatch: int32.
    """

    example: Count
    length: Count
    num_tokens: Count
    replica: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    num_replicas: int


@dataclass(frozen=True, eq=False)
class Placement:
    """A batch on a Plan. items: per module. method: how phases were balanced, one a microbatch; empty where not."""

    batch: BatchLengths
    num_microbatches: int
    items: dict[str, PlacedItems]
    method: tuple[str, ...] = ()

    def exchanged_rows(self, module: str) -> Count:
        """Rows of a module's output that the busiest replica sends or receives, int64 [num_microbatches]."""
        source = self.items[module]
        sink = self.items[BACKBONE].replica[source.example]
        moved = source.replica != sink
        busiest = np.zeros(self.num_microbatches, dtype=np.int64)
        for replica in (source.replica, sink):
            rows = np.zeros((self.num_microbatches, source.num_replicas), dtype=np.int64)
            np.add.at(rows, (source.microbatch[moved], replica[moved]), source.num_tokens[moved])
            busiest = np.maximum(busiest, rows.max(axis=1))
        return busiest

    @cached_property
    def present(self) -> tuple[Presence, ...]:
        """What each microbatch has, on any replica."""
        there = {
            name: np.bincount(items.microbatch, minlength=self.num_microbatches) for name, items in self.items.items()
        }
        moved = {name: self.exchanged_rows(name) for name in self.items if name != BACKBONE}
        return tuple(
            Presence(
                frozenset(name for name, count in there.items() if count[microbatch]),
                frozenset(name for name, rows in moved.items() if rows[microbatch]),
            )
            for microbatch in range(self.num_microbatches)
        )

    def island_key(self, island: int, num_islands: int) -> bytes:
        """Equal for islands whose replicas compute items of the same lengths: they take the same time."""
        parts: list[bytes] = []
        for items in self.items.values():
            in_island = items.num_replicas // num_islands
            own = items.replica // in_island == island
            num_targets = self.batch.num_targets[items.example[own]]
            rows = np.stack([items.replica[own] % in_island, items.microbatch[own], items.length[own], num_targets])
            parts.append(rows[:, np.lexsort(rows[::-1])].tobytes())
        return b"|".join(parts)


def draw_batch(plan: Plan, workload: Workload, rng: np.random.Generator) -> BatchLengths:
    """A batch of the plan's size. Raises UserError for a workload that lacks a module's lengths."""
    columns = workload.examples.items
    for module in plan.model.modules:
        if module.name == BACKBONE:
            continue
        if module.name not in columns or not columns[module.name].num_items:
            known = [name for name, items in columns.items() if items.num_items]
            raise UserError(
                f"The model's module {module.name!r} needs lengths, but {workload.source} has none of it; "
                f"it has {', '.join([*known, BACKBONE])}."
            )
    return workload.draw(plan.batch_size, rng)


def place(plan: Plan, batch: BatchLengths, balancing: Balancing = by_operations) -> Placement:
    """Place a batch of `plan.batch_size` examples on a Plan that fits (`check_fit`), a pipeline's as they come.

    balancing: by what training balances colocated phases.
    """
    if plan.schedule == "data_parallel":
        return _colocated(plan, batch, num_microbatches(plan), balancing)
    return place_in(plan, batch, slots_as_given(plan))


@dataclass(frozen=True, eq=False)
class Slots:
    """Where a pipeline computes each example of a step: columns [num_examples].

    microbatch: int64. position: int64, among the dp * microbatch_size of the backbone's that are taken at a time, of
    which every replica of a unit takes an equal range; several examples may be at one.
    """

    microbatch: Count
    position: Count


def slots_as_given(plan: Plan) -> Slots:
    """Examples in the order in which they come."""
    return Slots(*np.divmod(np.arange(plan.batch_size), plan.batch_size // num_microbatches(plan)))


def place_in(plan: Plan, batch: BatchLengths, slots: Slots) -> Placement:
    """A pipeline's batch, where each example has its slot."""
    count = num_microbatches(plan)
    num_taken = plan.batch_size // count
    backbone, in_bubbles = plan.unit_of(BACKBONE), colocated_units(plan)
    items = {}
    for module in plan.model.modules:
        unit = plan.unit_of(module.name)
        num_replicas = backbone.dp if unit in in_bubbles else unit.dp
        replica = slots.position * num_replicas // num_taken
        example, length, num_tokens = column(batch, module.name)
        places = (replica[example].astype(np.int32), slots.microbatch[example].astype(np.int32))
        items[module.name] = PlacedItems(example, length, num_tokens, *places, num_replicas)
    return Placement(batch, count, items)


def placed_as(microbatches: Sequence[BatchLengths], assignments: Sequence[Mapping[str, Assignment]]) -> Placement:
    """The step that was decided elsewhere, by training's own balancer say: per microbatch, one Assignment a module.

    The modules come in the order of the first microbatch's assignments. Raises ArgumentError where the two are not
    equally many.
    """
    if len(microbatches) != len(assignments) or not microbatches:
        raise ArgumentError(
            f"{len(microbatches)} microbatches have {len(assignments)} assignments; each must have one."
        )
    firsts = np.cumsum([0, *(part.num_examples for part in microbatches)])

    def joined(columns: Iterable[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(list(columns))

    items = {}
    for name in assignments[0]:
        columns = [column(part, name) for part in microbatches]
        items[name] = PlacedItems(
            joined(example + first for (example, _, _), first in zip(columns, firsts)),
            joined(length for _, length, _ in columns),
            joined(num_tokens for _, _, num_tokens in columns),
            joined(assigned[name].ranks for assigned in assignments),
            np.repeat(np.arange(len(columns), dtype=np.int32), [len(example) for example, _, _ in columns]),
            assignments[0][name].num_ranks,
        )
    batch = BatchLengths(
        joined(part.sequence for part in microbatches),
        joined(part.num_targets for part in microbatches),
        joined(part.home for part in microbatches),
        {name: ItemLengths(of.example, of.length, of.num_tokens) for name, of in items.items() if name != BACKBONE},
    )
    return Placement(batch, len(microbatches), items)


def column(batch: BatchLengths, module: str) -> tuple[Count, Count, Count]:
    """(example, length, num_tokens) of a module's items."""
    if module == BACKBONE:
        return np.arange(batch.num_examples), batch.sequence, batch.sequence
    items = batch.items[module]
    return items.example, items.length, items.num_tokens


def _colocated(plan: Plan, batch: BatchLengths, count: int, balancing: Balancing) -> Placement:
    """Each microbatch's phases over the ranks of the one unit."""
    num_ranks, size = plan.unit_of(BACKBONE).dp, batch.num_examples // count
    methods: tuple[str, ...] = ()
    if plan.balance == "off":
        home = home_ranks(size, num_ranks)
        replica = {module.name: home[column(batch, module.name)[0] % size] for module in plan.model.modules}
    else:
        costs = balancing(plan)
        parts = [batch.take(part) for part in np.split(np.arange(batch.num_examples), count)]
        choices = _choices(plan, costs, parts)
        methods = tuple(choice.method for choice in choices)
        placed = zip(*(choice.assignments for choice in choices), strict=True)
        replica = {
            name: np.concatenate([of.ranks for of in own]) for name, own in zip(costs.names, placed, strict=True)
        }
    items = {}
    for module in plan.model.modules:
        example, length, num_tokens = column(batch, module.name)
        places = (replica[module.name], (example // size).astype(np.int32))
        items[module.name] = PlacedItems(example, length, num_tokens, *places, num_ranks)
    return Placement(batch, count, items, methods)


def _choices(plan: Plan, costs: StepCosts, parts: Sequence[BatchLengths]) -> list[Choice]:
    """How each microbatch is balanced, decided side by side: the balance core does not hold Python's lock."""
    assert plan.balance != "off"
    methods: tuple[Method, ...] = METHODS if plan.balance == "auto" else (plan.balance,)
    unit, link = plan.unit_of(BACKBONE), costs.times.link

    def decide(part: BatchLengths) -> Choice:
        # Tensor-parallel ranks share what a rank would do alone.
        phases = [replace(own, seconds_per_cost=own.seconds_per_cost / unit.tp) for own in costs.phases(part)]
        return choose(phases, unit.dp, link, methods=methods)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(decide, parts))
