"""Which replica and microbatch of a Plan computes which items of a batch: the Assignment that a prediction is made for.

Examples come in their order: microbatch by microbatch, replica by replica. Colocated phases (`data_parallel`) are
balanced as training balances them, by `motet.balance.choose`; in a pipeline `balance = "joint"` places the whole
examples of each microbatch over the backbone's replicas (DistTrain section 5.1, with all modules' costs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.balance import METHODS, Method, Packed, Padded, Phase, assign_jointly, choose
from motet.core.cluster import Link
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE, BatchLengths, Workload
from motet.schedule.fit import colocated_units

Count = NDArray[np.int64]
PhaseSeconds = Callable[[str, Count], float]
"""Seconds of one rank for items of the given lengths of a module, forward and backward."""


@dataclass(frozen=True, eq=False)
class PlacedItems:
    """The items of one module, ordered by example: columns [num_items].

    example: int64. length: int64, what the module computes on. num_tokens: int64, rows in the backbone's sequence.
    replica: int32, data-parallel replica of the module's unit. microbatch: int32.
    """

    example: Count
    length: Count
    num_tokens: Count
    replica: NDArray[np.int32]
    microbatch: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """A batch on a Plan. items: per module. method: how phases were balanced, one a microbatch; empty where not."""

    batch: BatchLengths
    num_microbatches: int
    items: dict[str, PlacedItems]
    method: tuple[str, ...] = ()

    def exchanged_rows(self, module: str, num_replicas: int) -> Count:
        """Rows of a module's output that the busiest replica sends or receives, int64 [num_microbatches]."""
        source = self.items[module]
        sink = self.items[BACKBONE].replica[source.example]
        moved = source.replica != sink
        rows = source.num_tokens[moved]
        busiest = np.zeros(self.num_microbatches, dtype=np.int64)
        for replica in (source.replica[moved], sink[moved]):
            place = source.microbatch[moved].astype(np.int64) * num_replicas + replica
            totals = np.bincount(place, rows, self.num_microbatches * num_replicas).astype(np.int64)
            busiest = np.maximum(busiest, totals.reshape(self.num_microbatches, num_replicas).max(axis=1))
        return busiest

    def island_key(self, island: int, num_islands: int) -> bytes:
        """Equal for islands whose replicas compute items of the same lengths: they take the same time."""
        parts: list[bytes] = []
        for items in self.items.values():
            in_island = (int(items.replica.max(initial=0)) + num_islands) // num_islands
            own = items.replica // in_island == island
            rows = np.stack([items.replica[own] % in_island, items.microbatch[own], items.length[own]])
            parts.append(rows[:, np.lexsort(rows[::-1])].tobytes())
        return b"|".join(parts)


def num_microbatches(plan: Plan) -> int:
    """Microbatches of a step. Raises UserError where batch_size is no whole number of them."""
    share = plan.unit_of(BACKBONE).dp * plan.microbatch_size
    if plan.batch_size % share:
        raise UserError(
            f"batch_size = {plan.batch_size} must be a multiple of {share}: {plan.unit_of(BACKBONE).dp} replicas of "
            f"the backbone with microbatches of {plan.microbatch_size}."
        )
    return plan.batch_size // share


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


def place(plan: Plan, batch: BatchLengths, seconds: PhaseSeconds, link: Link, element_bytes: int = 2) -> Placement:
    """Place a batch of `plan.batch_size` examples. seconds: prices phases against each other; link: exchanges."""
    count = num_microbatches(plan)
    parts = np.split(np.arange(batch.num_examples), count)
    if plan.schedule == "data_parallel":
        return _colocated(plan, batch, parts, _Prices(plan, seconds, link, element_bytes))
    backbone, in_bubbles = plan.unit_of(BACKBONE), colocated_units(plan)
    replica = np.concatenate([_replicas(plan, batch.take(part), backbone.dp, seconds) for part in parts])
    microbatch = np.repeat(np.arange(count, dtype=np.int32), len(parts[0]))
    items = {}
    for module in plan.model.modules:
        unit = plan.unit_of(module.name)
        # Encoders in bubbles encode for the replica of the backbone on whose ranks they run.
        shared = replica if unit in in_bubbles else _shared_out(unit, backbone, replica, microbatch)
        items[module.name] = _follow(batch, module.name, shared, microbatch)
    return Placement(batch, count, items)


def _column(batch: BatchLengths, module: str) -> tuple[Count, Count, Count]:
    """(example, length, num_tokens) of a module's items."""
    if module == BACKBONE:
        return np.arange(batch.num_examples), batch.sequence, batch.sequence
    items = batch.items[module]
    return items.example, items.length, items.num_tokens


def _follow(batch: BatchLengths, module: str, replica: NDArray[np.int32], microbatch: NDArray[np.int32]) -> PlacedItems:
    """The items of a module in the replica and microbatch of their example, int32 [num_examples] each."""
    example, length, num_tokens = _column(batch, module)
    return PlacedItems(example, length, num_tokens, replica[example], microbatch[example])


def _replicas(plan: Plan, part: BatchLengths, num_replicas: int, seconds: PhaseSeconds) -> NDArray[np.int32]:
    """The replica of the backbone that computes each example of one microbatch, int32 [num_examples]."""
    if plan.balance == "off":
        return np.repeat(np.arange(num_replicas, dtype=np.int32), part.num_examples // num_replicas)
    if plan.balance != "joint":
        raise UserError(
            f'balance = "{plan.balance}" places the items of colocated phases, and is for schedule = "data_parallel"; '
            f'with schedule = "{plan.schedule}" it must be "off" or "joint".'
        )
    costs = np.zeros((part.num_examples, len(plan.model.modules)))
    for number, module in enumerate(plan.model.modules):
        example, length, _ = _column(part, module.name)
        unit_s = seconds(module.name, length) / max(int(length.sum()), 1) / plan.unit_of(module.name).num_ranks
        costs[:, number] = np.bincount(example, length * unit_s, part.num_examples)
    scale = 2**40 / max(costs.sum(axis=0).max(), 1e-30)
    return assign_jointly(np.rint(costs * scale).astype(np.int64), num_replicas).ranks


def _shared_out(
    unit: Unit, backbone: Unit, replica: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The replica of a unit that computes each example, where its replicas are more or fewer than the backbone's.

    Of each island (gcd of the two sizes) and microbatch, the examples in the order of the backbone's replicas are cut
    into equal parts, one a replica (MMScale section 4.2). Where there are fewer examples than that, replicas take
    turns.
    """
    if unit.dp == backbone.dp:
        return replica
    num_islands = math.gcd(unit.dp, backbone.dp)
    in_island = unit.dp // num_islands
    island = replica // (backbone.dp // num_islands)
    group = microbatch.astype(np.int64) * num_islands + island
    order = np.lexsort((np.arange(len(replica)), replica, group))
    size = np.bincount(group)
    position = np.empty(len(replica), dtype=np.int64)
    position[order] = np.arange(len(replica)) - np.repeat(np.cumsum(size) - size, size)
    wide = size[group]
    part = np.where(wide >= in_island, position * in_island // wide, (position + microbatch) % in_island)
    return (island * in_island + part).astype(np.int32)


@dataclass(frozen=True)
class _Prices:
    """What balancing compares phases by."""

    plan: Plan
    seconds: PhaseSeconds
    link: Link
    element_bytes: int

    def phases(self, part: BatchLengths) -> list[Phase]:
        return [self._phase(part, BACKBONE), *(self._phase(part, name) for name in part.items if self._runs(name))]

    def _runs(self, name: str) -> bool:
        return any(module.name == name for module in self.plan.model.modules)

    def _phase(self, part: BatchLengths, name: str) -> Phase:
        module = self.plan.model.module(name)
        cost = Padded() if module.padded else Packed()
        example, length, num_tokens = _column(part, name)
        width = module.layers[-1].output_width
        return Phase(
            name,
            length,
            cost,
            example,
            self.seconds(name, length) / max(int(cost.alone(length).sum()), 1),
            None if name == BACKBONE else num_tokens * width * self.element_bytes,
            num_exchanges=2 if module.trains else 1,
        )


def _colocated(plan: Plan, batch: BatchLengths, parts: Sequence[Count], prices: _Prices) -> Placement:
    """Each microbatch's phases over the ranks of the one unit."""
    num_ranks = plan.unit_of(BACKBONE).dp
    names = [module.name for module in plan.model.modules]
    columns: dict[str, list[NDArray[np.int32]]] = {name: [] for name in names}
    methods: list[str] = []
    for part in parts:
        lengths = batch.take(part)
        if plan.balance == "off":
            home = np.repeat(np.arange(num_ranks, dtype=np.int32), len(part) // num_ranks)
            for name in names:
                columns[name].append(home[_column(lengths, name)[0]])
            continue
        phases = prices.phases(lengths)
        allowed: tuple[Method, ...] = METHODS if plan.balance == "auto" else (plan.balance,)
        choice = choose(phases, num_ranks, prices.link, methods=allowed)
        methods.append(choice.method)
        for phase, placed in zip(phases, choice.assignments, strict=True):
            columns[phase.name].append(placed.ranks)
    microbatch = np.repeat(np.arange(len(parts), dtype=np.int32), len(parts[0]))
    items = {}
    for name in names:
        example, length, num_tokens = _column(batch, name)
        items[name] = PlacedItems(example, length, num_tokens, np.concatenate(columns[name]), microbatch[example])
    return Placement(batch, len(parts), items, tuple(methods))
