"""Blocks cut into stages: what a stage takes, what of it is recomputed, what a step takes in closed form.

Cut and recomputation depend on each other: what is recomputed takes longer, and where stages are cut says what they
hold. They are settled in turn, from no recomputation on: cut by seconds; recompute the least that fits (OmniBal section
4.3); let each block take longer by the share of its module that its stage recomputes, and, where all of that does not
suffice, count for more by how much the rank is too full; cut again. This ends when a cut comes up again, or after
ROUNDS; the best that came up is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.planner.stages.blocks import Blocks
from motet.planner.stages.recompute import RecomputeMode, least_recompute
from motet.schedule import Kind, Program

ROUNDS = 4

ROUNDING = 1e-4
"""Of memory, that is left free: bytes of a row are rounded up in each layer."""


@dataclass(frozen=True, eq=False)
class StageLimits:
    """What stages must fit into.

    rank:    [num_stages], the pipeline rank of each stage.
    moments: per pipeline rank [num_moments, its stages]: microbatches of which it holds activations at a time; the
             fullest moments, of which none holds as many of every stage as another.
    mode:    whether no, the least or all activations are recomputed.
    """

    rank: Int64Array
    moments: tuple[Int64Array, ...]
    capacity_bytes: float
    mode: RecomputeMode = "least"

    @classmethod
    def of(cls, program: Program, capacity_bytes: float, mode: RecomputeMode = "least") -> StageLimits:
        """Of the passes of a schedule. O(actions * stages of a rank)."""
        rank = np.array([stage.rank for stage in program.stages])
        return cls(rank, tuple(_moments(program, number) for number in range(program.num_ranks)), capacity_bytes, mode)


def _moments(program: Program, rank: int) -> Int64Array:
    own = [number for number, stage in enumerate(program.stages) if stage.rank == rank]
    effect = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
    row = [(action.stage, effect.get(action.kind, 0)) for action in program.actions[rank]]
    stage, shift = np.array(row).T
    change = np.where(stage[:, None] == np.array(own), shift[:, None], 0)
    held = np.unique(change.cumsum(axis=0)[shift > 0], axis=0)
    as_full = (held[:, None] >= held[None]).all(axis=2)
    fullest: Int64Array = held[as_full.sum(axis=0) == 1]
    return fullest


@dataclass(frozen=True, eq=False)
class Stages:
    """A cut of blocks, and what is recomputed.

    stage: [num_blocks]. recomputed: bool [num_blocks]; of a module in a stage, the first ones are.
    shortfall_bytes: on the fullest pipeline rank, with all recomputed that may be; 0 where all fits.
    fullness:    [num_ranks], bytes by capacity.
    """

    blocks: Blocks
    stage: Int64Array
    num_stages: int
    recomputed: BoolArray
    fullness: Float64Array
    shortfall_bytes: float

    @cached_property
    def forward_s(self) -> Float64Array:
        return self.sums(self.blocks.forward_s)

    @cached_property
    def backward_s(self) -> Float64Array:
        """With recomputation."""
        return self.sums(self.blocks.backward_s + self.blocks.recompute_s * self.recomputed)

    @cached_property
    def seconds(self) -> Float64Array:
        """Of one microbatch, forward and backward."""
        return self.forward_s + self.backward_s

    @cached_property
    def output_bytes(self) -> Float64Array:
        """Of the last block of each stage."""
        last = np.zeros(self.num_stages, dtype=np.int64)
        last[self.stage] = np.arange(self.blocks.num_blocks)
        return self.blocks.output_bytes[last]

    def sums(self, column: Float64Array) -> Float64Array:
        """Of each stage."""
        return np.bincount(self.stage, column, self.num_stages).astype(np.float64)

    @property
    def layers(self) -> tuple[Mapping[str, int], ...]:
        """As `Unit.stages` has them."""
        return self._counts(np.ones(self.blocks.num_blocks, dtype=np.bool_))

    @property
    def recompute(self) -> tuple[Mapping[str, int], ...]:
        """As `Unit.recompute` has them."""
        return self._counts(self.recomputed) if self.recomputed.any() else ()

    def _counts(self, which: BoolArray) -> tuple[Mapping[str, int], ...]:
        found: list[dict[str, int]] = [{} for _ in range(self.num_stages)]
        for stage, owner in zip(self.stage[which].tolist(), self.blocks.owner[which].tolist()):
            name = self.blocks.names[owner]
            found[stage][name] = found[stage].get(name, 0) + 1
        return tuple(found)


def stage_numbers(counts: Sequence[int]) -> Int64Array:
    """The stage of each block, where stages take so many in order."""
    return np.repeat(np.arange(len(counts)), counts)


def stages_of(blocks: Blocks, stage: Int64Array, room: StageLimits) -> Stages:
    """The cut with what is recomputed. The least is exact for ranks of one stage; of ranks with several, where what is
    held changes from moment to moment, it is exact for the fullest one, and raised until all moments fit.
    """
    recomputed = np.zeros(blocks.num_blocks, dtype=np.bool_)
    if room.mode == "full":
        recomputed = blocks.can_spare
    fullness = np.array([_peak_bytes(blocks, stage, room, rank, recomputed) for rank in range(len(room.moments))])
    capacity = room.capacity_bytes * (1 - ROUNDING)
    if room.mode == "least":
        for rank in np.flatnonzero(fullness > capacity).tolist():
            recomputed = recomputed | _recomputed_on(blocks, stage, room, rank)
            fullness[rank] = _peak_bytes(blocks, stage, room, rank, recomputed)
    shortfall_bytes = max(float(fullness.max()) - capacity, 0.0)
    return Stages(blocks, stage, len(room.rank), recomputed, fullness / capacity, shortfall_bytes)


def _peak_bytes(blocks: Blocks, stage: Int64Array, room: StageLimits, rank: int, recomputed: BoolArray) -> float:
    own = room.rank[stage] == rank
    kept = np.bincount(stage, blocks.kept_bytes - blocks.saved_bytes * recomputed, len(room.rank))
    held = room.moments[rank] @ kept[room.rank == rank]
    working = np.where(recomputed, blocks.working_again_bytes, blocks.working_bytes)[own]
    return float(blocks.state_bytes[own].sum() + held.max() + working.max())


def _recomputed_on(blocks: Blocks, stage: Int64Array, room: StageLimits, rank: int) -> BoolArray:
    """What must be, bool [num_blocks], so that a rank's stages fit; all that can be, where they do not even so."""
    own = np.flatnonzero((room.rank[stage] == rank) & blocks.can_spare)
    none = np.zeros(blocks.num_blocks, dtype=np.bool_)
    all_of_it = none.copy()
    all_of_it[own] = True
    capacity = room.capacity_bytes * (1 - ROUNDING)
    if _peak_bytes(blocks, stage, room, rank, all_of_it) > capacity:
        return all_of_it
    numbers = np.flatnonzero(room.rank == rank)
    kept = np.bincount(stage, blocks.kept_bytes, len(room.rank))[numbers]
    moments = room.moments[rank]
    in_flight = np.zeros(len(room.rank), dtype=np.int64)
    in_flight[numbers] = moments[int(np.argmax(moments @ kept))]
    of_module = {
        name: _fullest_first(own[blocks.owner[own] == place], in_flight[stage])
        for place, name in enumerate(blocks.names)
    }
    of_module = {name: places for name, places in of_module.items() if len(places)}
    mine = room.rank[stage] == rank
    idle = float(blocks.working_bytes[mine].max())
    again = {name: blocks.recompute_s[places] for name, places in of_module.items()}
    spared = {name: blocks.saved_bytes[places] * in_flight[stage[places]] for name, places in of_module.items()}
    grown = {name: np.maximum(blocks.working_again_bytes[places] - idle, 0) for name, places in of_module.items()}
    lacking = float(blocks.state_bytes[mine].sum() + in_flight[numbers] @ kept + idle) - capacity
    while True:
        counts = least_recompute(again, spared, lacking, grown)
        if counts is None:
            return all_of_it
        chosen = none.copy()
        for name, count in counts.items():
            chosen[of_module[name][:count]] = True
        over = _peak_bytes(blocks, stage, room, rank, chosen) - capacity
        if over <= 0:
            return chosen
        lacking += max(over, 1.0)


def _fullest_first(places: Int64Array, in_flight: Int64Array) -> Int64Array:
    """Of a module's blocks on a rank, those of which most microbatches are held first."""
    found: Int64Array = places[np.argsort(-in_flight[places], kind="stable")]
    return found


def settle(
    blocks: Blocks,
    room: StageLimits,
    cut: Callable[[Float64Array], Int64Array],
    step_s: Callable[[Stages], float],
    block_s: Float64Array | None = None,
) -> Stages:
    """The best of the cuts that cut and recomputation lead to in turn (above): one that fits, then the least step_s; or
    what lacks the least memory.

    cut: of the seconds of each block, its stage. block_s: what it starts from, by default forward and backward.
    """
    found: dict[bytes, Stages] = {}
    weight = np.ones(blocks.num_blocks)
    counted = blocks.seconds if block_s is None else block_s
    added = np.zeros(blocks.num_blocks)
    for _ in range(ROUNDS):
        stage = cut((counted + added) * weight)
        if stage.tobytes() in found:
            break
        stages = found[stage.tobytes()] = stages_of(blocks, stage, room)
        alike = stage * len(blocks.names) + blocks.owner
        share = np.bincount(alike, stages.recomputed) / np.maximum(np.bincount(alike), 1)
        added = blocks.recompute_s * share[alike]
        weight = weight * np.maximum(stages.fullness, 1.0)[room.rank[stage]]
        if not stages.recomputed.any() and not stages.shortfall_bytes:
            break
    return min(found.values(), key=lambda stages: (stages.shortfall_bytes, step_s(stages)))
