"""A cut of blocks into stages: which blocks are recomputed, and the seconds and bytes of each stage.

Cut and recomputation depend on each other: recomputed blocks take longer, and the cut decides what each rank must hold.
`settle` finds both in turn, starting without recomputation:

1. cut by the seconds of the blocks;
2. recompute the least that fits (OmniBal section 4.3);
3. add recomputation to the seconds of the blocks: to each, the share of its module that its stage recomputes;
4. where even full recomputation does not fit, multiply the seconds of a rank's blocks by bytes / capacity;
5. cut again, until a cut comes up again or ROUNDS are over. The best cut of all rounds is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.planner.stages.blocks import Blocks
from motet.planner.stages.recompute import LeastRecompute, RecomputeMode
from motet.schedule import Kind, Program

ROUNDS = 4

ROUNDING = 1e-4
"""The share of memory that stays free, because the bytes of a row are rounded up in each layer."""


@dataclass(frozen=True, eq=False)
class StageLimits:
    """The limits of the stages of a pipeline.

    rank:    [num_stages], the pipeline rank of each stage.
    moments: per pipeline rank [num_moments, stages of the rank]: for how many microbatches the rank holds activations
             of each of its stages. Only the fullest moments are listed: none holds at least as many of every stage as
             another.
    mode:    whether no activations, the least that fits, or all are recomputed.
    """

    rank: Int64Array
    moments: tuple[Int64Array, ...]
    capacity_bytes: float
    mode: RecomputeMode = "least"

    @classmethod
    def of(cls, program: Program, capacity_bytes: float, mode: RecomputeMode = "least") -> StageLimits:
        """The limits of a schedule's passes. O(actions * stages of a rank)."""
        rank = np.array([stage.rank for stage in program.stages])
        return cls(rank, tuple(_moments(program, number) for number in range(program.num_ranks)), capacity_bytes, mode)

    @classmethod
    def of_one_stage(cls, num_held: Sequence[int], capacity_bytes: float, mode: RecomputeMode = "least") -> StageLimits:
        """The limits of ranks with one stage each, without a Program. num_held: the most microbatches that each holds.

        Under 1F1B a stage holds one more than stages follow it; under ZB-H1 the first one's number, on every rank.
        """
        moments = tuple(np.array([[number]]) for number in num_held)
        return cls(np.arange(len(moments)), moments, capacity_bytes, mode)


def _moments(program: Program, rank: int) -> Int64Array:
    """The fullest moments of a pipeline rank, [num_moments, stages of the rank]."""
    stages_of_rank = [number for number, stage in enumerate(program.stages) if stage.rank == rank]
    column = {stage: number for number, stage in enumerate(stages_of_rank)}
    held, moments = [0] * len(column), set[tuple[int, ...]]()
    for action in program.actions[rank]:
        if action.kind is Kind.F:
            held[column[action.stage]] += 1
            moments.add(tuple(held))
        elif action.kind is Kind.B or action.kind is Kind.W:
            held[column[action.stage]] -= 1
    every = np.array(sorted(moments))
    is_covered = np.ones((len(every), len(every)), dtype=np.bool_)
    for of_stage in every.T:
        is_covered &= of_stage[:, None] >= of_stage[None]
    fullest: Int64Array = every[is_covered.sum(axis=0) == 1]
    return fullest


@dataclass(frozen=True, eq=False)
class Stages:
    """A cut of blocks into stages, and the blocks that are recomputed.

    stage:           [num_blocks], the stage of each block.
    recomputed:      bool [num_blocks]; of a module in a stage, the first blocks are.
    fullness:        [num_ranks], bytes / capacity.
    shortfall_bytes: memory that the fullest pipeline rank lacks; 0 if all ranks fit.
    """

    blocks: Blocks
    stage: Int64Array
    num_stages: int
    recomputed: BoolArray
    fullness: Float64Array
    shortfall_bytes: float

    @cached_property
    def forward_s(self) -> Float64Array:
        """[num_stages], for one microbatch."""
        return self.sums(self.blocks.forward_s)

    @cached_property
    def backward_s(self) -> Float64Array:
        """[num_stages], for one microbatch, with recomputation."""
        return self.sums(self.blocks.backward_s + self.blocks.recompute_s * self.recomputed)

    @cached_property
    def weight_s(self) -> Float64Array:
        """[num_stages]: the part of backward_s that comes in W where backward is split."""
        return self.sums(self.blocks.deferred_s)

    @cached_property
    def seconds(self) -> Float64Array:
        """[num_stages]: forward and backward of one microbatch."""
        return self.forward_s + self.backward_s

    @cached_property
    def output_bytes(self) -> Float64Array:
        """[num_stages]: the output of the last block of each stage."""
        last = np.zeros(self.num_stages, dtype=np.int64)
        last[self.stage] = np.arange(self.blocks.num_blocks)
        return self.blocks.output_bytes[last]

    def sums(self, column: Float64Array) -> Float64Array:
        """[num_stages]: the sum of a column [num_blocks] over the blocks of each stage."""
        return np.bincount(self.stage, column, self.num_stages).astype(np.float64)

    @property
    def layers(self) -> tuple[Mapping[str, int], ...]:
        """Blocks by stage and module, as in `Unit.stages`."""
        return self._counts(np.ones(self.blocks.num_blocks, dtype=np.bool_))

    @property
    def recompute(self) -> tuple[Mapping[str, int], ...]:
        """Recomputed blocks by stage and module, as in `Unit.recompute`."""
        return self._counts(self.recomputed) if self.recomputed.any() else ()

    def _counts(self, which: BoolArray) -> tuple[Mapping[str, int], ...]:
        counts: list[dict[str, int]] = [{} for _ in range(self.num_stages)]
        for stage, owner in zip(self.stage[which].tolist(), self.blocks.owner[which].tolist()):
            name = self.blocks.names[owner]
            counts[stage][name] = counts[stage].get(name, 0) + 1
        return tuple(counts)


def stage_numbers(counts: Sequence[int]) -> Int64Array:
    """The stage of each block, where stage s takes the next counts[s] blocks.

    Example:
        >>> stage_numbers((2, 1, 3)).tolist()
        [0, 0, 1, 2, 2, 2]
    """
    return np.repeat(np.arange(len(counts)), counts)


def stages_of(blocks: Blocks, stage: Int64Array, limits: StageLimits) -> Stages:
    """The stages of a cut, with the blocks that must be recomputed.

    Mode "least" is exact for ranks with one stage. A rank with several stages has several fullest moments: the choice
    is exact for one of them, and grows until all fit.
    """
    recomputed = blocks.can_recompute if limits.mode == "full" else np.zeros(blocks.num_blocks, dtype=np.bool_)
    held = _Held(blocks, stage, limits)
    fullness = np.array([held.peak_bytes(rank, recomputed) for rank in range(len(limits.moments))])
    capacity = limits.capacity_bytes * (1 - ROUNDING)
    if limits.mode == "least":
        for rank in np.flatnonzero(fullness > capacity).tolist():
            recomputed = recomputed | held.least_recomputed(rank, capacity)
            fullness[rank] = held.peak_bytes(rank, recomputed)
    shortfall_bytes = max(float(fullness.max()) - capacity, 0.0)
    return Stages(blocks, stage, len(limits.rank), recomputed, fullness / capacity, shortfall_bytes)


class _OfRank(NamedTuple):
    """What of a cut's blocks is a pipeline rank's. own: their numbers; the columns are of these.

    rank_bytes: its state. place: [num_own], of the block's stage among the rank's.
    """

    own: Int64Array
    rank_bytes: float
    place: Int64Array
    num_stages: int
    kept_bytes: Float64Array
    saved_bytes: Float64Array
    start_bytes: Float64Array
    working_bytes: Float64Array
    recompute_working_bytes: Float64Array

    def kept(self, is_recomputed: BoolArray | bool) -> Float64Array:
        """[stages of the rank]: activations that a microbatch keeps. is_recomputed: of the rank's blocks."""
        kept = self.kept_bytes - self.saved_bytes * is_recomputed + self.start_bytes
        return np.bincount(self.place, kept, self.num_stages).astype(np.float64)


class _Held:
    """What the pipeline ranks of a cut hold. recomputed: bool [num_blocks], of all blocks, here and below."""

    def __init__(self, blocks: Blocks, stage: Int64Array, limits: StageLimits) -> None:
        self.blocks, self.stage, self.moments = blocks, stage, limits.moments
        rank, ranks = limits.rank[stage], np.arange(len(limits.moments))
        by_rank = np.argsort(rank, kind="stable")
        self._own = np.split(by_rank, np.searchsorted(rank[by_rank], ranks[1:]))
        self._stages = [np.flatnonzero(limits.rank == number) for number in ranks]
        self._start_bytes = blocks.start_bytes * (np.diff(stage, prepend=-1) != 0)
        first, last = blocks.ends_of_backbone
        # Of weights that two stages share, a rank with both of them has what they share once.
        self._end = {} if stage[first] == stage[last] else {int(rank[end]): end for end in (last, first)}
        self._ranks: dict[int, _OfRank] = {}

    def peak_bytes(self, rank: int, recomputed: BoolArray) -> float:
        """State, activations of the fullest moment, and the largest transients of a pipeline rank."""
        one = self._of_rank(rank)
        is_recomputed = recomputed[one.own]
        held = self.moments[rank] @ one.kept(is_recomputed)
        working = np.where(is_recomputed, one.recompute_working_bytes, one.working_bytes)
        return one.rank_bytes + float(held.max() + working.max())

    def _of_rank(self, rank: int) -> _OfRank:
        """What of the blocks is a rank's: it is asked for again with each choice of recomputed blocks."""
        if rank not in self._ranks:
            own, stages, blocks = self._own[rank], self._stages[rank], self.blocks
            state_bytes = float(blocks.state_bytes[own].sum())
            if rank in self._end:
                state_bytes += float(blocks.apart_bytes[self._end[rank]])
            self._ranks[rank] = _OfRank(
                own,
                state_bytes,
                np.searchsorted(stages, self.stage[own]),
                len(stages),
                blocks.kept_bytes[own],
                blocks.saved_bytes[own],
                self._start_bytes[own],
                blocks.working_bytes[own],
                blocks.recompute_working_bytes[own],
            )
        return self._ranks[rank]

    def least_recomputed(self, rank: int, capacity: float) -> BoolArray:
        """The least recomputation that makes a rank's stages fit; all of it if even that does not."""
        blocks, own, stage = self.blocks, self._own[rank], self.stage
        everything = np.zeros(blocks.num_blocks, dtype=np.bool_)
        everything[own] = blocks.can_recompute[own]
        if self.peak_bytes(rank, everything) > capacity:
            return everything
        # 1. Count microbatches as in the moment that is fullest without recomputation.
        in_flight, lacking = self._fullest_moment(rank)
        lacking -= capacity
        # 2. Tabulate what recomputing each block takes and saves, by module.
        indices = _by_module(blocks, np.flatnonzero(everything), in_flight[stage])
        idle = float(blocks.working_bytes[own].max())
        seconds = {name: blocks.recompute_s[index] for name, index in indices.items()}
        saved = {name: blocks.saved_bytes[index] * in_flight[stage[index]] for name, index in indices.items()}
        grown = {name: np.maximum(blocks.recompute_working_bytes[index] - idle, 0) for name, index in indices.items()}
        # 3. Take the least that suffices for that moment; if another moment lacks bytes then, ask for as many more.
        choice = LeastRecompute(seconds, saved, grown)
        while True:
            counts = choice.for_bytes(lacking)
            if counts is None:
                return everything
            chosen = np.zeros(blocks.num_blocks, dtype=np.bool_)
            for name, count in counts.items():
                chosen[indices[name][:count]] = True
            over = self.peak_bytes(rank, chosen) - capacity
            if over <= 0:
                return chosen
            lacking += max(over, 1.0)

    def _fullest_moment(self, rank: int) -> tuple[Int64Array, float]:
        """Microbatches in flight of each stage, int64 [num_stages], and the rank's bytes at that moment.

        It is the fullest moment if nothing is recomputed. Stages of other ranks have 0.
        """
        one, moments, stages = self._of_rank(rank), self.moments[rank], self._stages[rank]
        kept = one.kept(False)
        in_flight = np.zeros(sum(map(len, self._stages)), dtype=np.int64)
        in_flight[stages] = moments[int(np.argmax(moments @ kept))]
        held = in_flight[stages] @ kept
        return in_flight, one.rank_bytes + float(held + float(one.working_bytes.max()))


def _by_module(blocks: Blocks, indices: Int64Array, in_flight: Int64Array) -> dict[str, Int64Array]:
    """Indices of blocks by module, those with the most microbatches in flight [num_blocks] first."""
    by_module = {}
    for number, name in enumerate(blocks.names):
        of_module = indices[blocks.owner[indices] == number]
        if len(of_module):
            by_module[name] = of_module[np.argsort(-in_flight[of_module], kind="stable")]
    return by_module


def settle(
    blocks: Blocks,
    limits: StageLimits,
    cut: Callable[[Float64Array], Int64Array],
    step_s: Callable[[Stages], float],
    block_s: Float64Array | None = None,
) -> Stages:
    """The best of the cuts that cut and recomputation in turn lead to (above).

    Of the cuts that fit, it has the least step_s; if none fits, it lacks the least memory.
    cut:     from seconds [num_blocks] to the stage of each block.
    block_s: the seconds of the first cut without recomputation, by default forward and backward.
    """
    by_cut: dict[bytes, Stages] = {}
    weight = np.ones(blocks.num_blocks)
    base_s = blocks.seconds if block_s is None else block_s
    added_s = np.zeros(blocks.num_blocks)
    for _ in range(ROUNDS):
        stage = cut((base_s + added_s) * weight)
        if stage.tobytes() in by_cut:
            break
        stages = by_cut[stage.tobytes()] = stages_of(blocks, stage, limits)
        stage_and_module = stage * len(blocks.names) + blocks.owner
        share = np.bincount(stage_and_module, stages.recomputed) / np.maximum(np.bincount(stage_and_module), 1)
        added_s = blocks.recompute_s * share[stage_and_module]
        weight = weight * np.maximum(stages.fullness, 1.0)[limits.rank[stage]]
        if not stages.recomputed.any() and not stages.shortfall_bytes:
            break
    return min(by_cut.values(), key=lambda stages: (stages.shortfall_bytes, step_s(stages)))
