"""Which replica computes which items of a step, in which microbatch, in which order: the Assignment of a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved, moved
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.passes import Presence


@dataclass(frozen=True, eq=False)
class ModuleAssignment:
    """The items of one module, ordered by example, and who computes them: columns [num_items].

    example: int64. length: int64, what the module computes on. num_tokens: int64, rows in the backbone's sequence.
    replica: int32, one of num_replicas: of the module's unit, or, of encoders in bubbles, of the backbone on whose
    ranks they run. microbatch: int32. position: int64, among the items of its replica and microbatch, from 0.
    """

    example: Int64Array
    length: Int64Array
    num_tokens: Int64Array
    replica: Int32Array
    microbatch: Int32Array
    position: Int64Array
    num_replicas: int

    def batch_index(self, num_microbatches: int) -> Int64Array:
        """Replica and microbatch of each item as one number, int64 [num_items]: replica by replica."""
        return self.replica.astype(np.int64) * num_microbatches + self.microbatch

    def items_of(self, replica: int, microbatch: int) -> Int64Array:
        """The items that a replica computes in a microbatch, int64, in the order in which it does."""
        own = np.flatnonzero((self.replica == replica) & (self.microbatch == microbatch))
        return own[np.argsort(self.position[own])]


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """A step on a Plan. modules: per module. methods: how phases were balanced, one a microbatch; () where not."""

    batch: BatchLengths
    num_microbatches: int
    modules: dict[str, ModuleAssignment]
    methods: tuple[str, ...] = ()

    def moved_rows(self, module: str, node: NDArray[np.integer]) -> Moved:
        """Rows of a module's output that move to the replicas of the backbone, [num_microbatches, 2, num_replicas].

        node: [num_replicas], where each replica sits. For a module and a backbone on the same ranks.
        """
        items = self.modules[module]
        sink = self.modules[BACKBONE].replica[items.example]
        return moved(items.replica, sink, items.num_tokens, node, items.microbatch, self.num_microbatches)

    def exchanged_rows(self, module: str) -> Int64Array:
        """Rows of a module's output that the busiest replica sends or receives, int64 [num_microbatches]."""
        one_node = np.zeros(self.modules[module].num_replicas, dtype=np.int64)
        return self.moved_rows(module, one_node).busiest.astype(np.int64)

    @cached_property
    def present(self) -> tuple[Presence, ...]:
        """What each microbatch has, on any replica."""
        there = {
            name: np.bincount(items.microbatch, minlength=self.num_microbatches) for name, items in self.modules.items()
        }
        rows_of = {name: self.exchanged_rows(name) for name in self.modules if name != BACKBONE}
        return tuple(
            Presence(
                frozenset(name for name, count in there.items() if count[microbatch]),
                frozenset(name for name, rows in rows_of.items() if rows[microbatch]),
            )
            for microbatch in range(self.num_microbatches)
        )

    def island_key(self, island: int, num_islands: int) -> bytes:
        """Equal for islands whose replicas compute items of the same lengths: they take the same time."""
        parts: list[bytes] = []
        for items in self.modules.values():
            in_island = items.num_replicas // num_islands
            own = items.replica // in_island == island
            num_targets = self.batch.num_targets[items.example[own]]
            rows = np.stack([items.replica[own] % in_island, items.microbatch[own], items.length[own], num_targets])
            parts.append(rows[:, np.lexsort(rows[::-1])].tobytes())
        return b"|".join(parts)


def joined(
    microbatches: Sequence[BatchLengths],
    assignments: Sequence[Mapping[str, Assignment]],
    methods: tuple[str, ...] = (),
) -> StepAssignment:
    """The step whose microbatches were decided one by one, by an `Orchestrator`: each has one Assignment a module.

    The modules come in the order of the first microbatch's assignments. Raises ArgumentError where the two are not
    equally many.
    """
    if len(microbatches) != len(assignments) or not microbatches:
        raise ArgumentError(
            f"{len(microbatches)} microbatches have {len(assignments)} assignments; each must have one."
        )
    batch = BatchLengths.joined(microbatches)
    modules = {}
    for name in assignments[0]:
        items, own = batch.of(name), [assigned[name] for assigned in assignments]
        modules[name] = ModuleAssignment(
            items.example,
            items.length,
            items.num_tokens,
            np.concatenate([one.ranks for one in own]),
            np.repeat(np.arange(len(own), dtype=np.int32), [one.num_items for one in own]),
            np.concatenate([one.positions for one in own]),
            own[0].num_ranks,
        )
    return StepAssignment(batch, len(microbatches), modules, methods)
