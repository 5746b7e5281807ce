"""Which activations are recomputed: the least that fits memory, per rank, stage and module (OmniBal section 4.3).

The input is, for each block, the seconds that its recomputation adds to backward and the bytes that it saves. The
answer is a number n for each module of a stage: its first n blocks are recomputed. This knapsack is solved exactly, in
integers. OmniBal finds the number of layers of each stage by trial; what it calls adaptive is the solution for each
stage by itself. A recomputed layer's activations come back while its backward runs: one layer at a time, in addition
to what the stages keep (`cost/memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.spec import ModelSpec
from motet.cost.memory import (
    CopiesOfLayer,
    LayerBytes,
    MixedPrecision,
    RowsOfLayer,
    Spans,
    StageLayer,
    stage_layers,
    stage_memory,
    taken_bytes,
)
from motet.simulate.predict.memory import MAX_LOGITS
from motet.simulate.predict.tied import tied_at_end

Key = TypeVar("Key", bound=Hashable)
RecomputeMode = Literal["none", "least", "full"]

_TOTAL_BITS = 40
_COUNT_BITS = 20
"""A cost is a fixed-point sort key. The high bits are seconds (_TOTAL_BITS for the seconds of all blocks); the low
_COUNT_BITS are the number of blocks, so that of equal seconds the fewest blocks win."""


class _BlockTables(NamedTuple):
    """What recomputing the first 0, 1, ... num_blocks blocks of a module comes to, int64 [num_blocks + 1].

    cost: the sort key. saved: bytes saved, rounded down. grown: bytes by which transients grow, rounded up.
    """

    cost: Int64Array
    saved: Int64Array
    grown: Int64Array


def least_recompute(
    recompute_s: Mapping[Key, Float64Array],
    saved_bytes: Mapping[Key, Float64Array],
    lacking_bytes: float,
    grown_bytes: Mapping[Key, Float64Array] | None = None,
) -> dict[Key, int] | None:
    """The number of first blocks to recompute of each module, so that memory suffices and the least time is added.

    A choice of numbers suffices if saved bytes - max(grown bytes) >= lacking_bytes. Of equal seconds, the fewest blocks
    win. None: recomputing all blocks does not suffice.

    recompute_s:   [num_blocks] of each module (or stage and module): seconds that recomputing a block adds to backward.
    saved_bytes:   [num_blocks] of each: what recomputing a block saves, over all microbatches in flight.
    lacking_bytes: the bytes to save; if it is not positive, nothing is recomputed.
    grown_bytes:   [num_blocks] of each: by how much recomputing the block makes transients larger; by default 0.
    Raises ArgumentError for columns that differ in length, and for values that are negative or not finite.
    O(blocks^modules) at worst. Choices that another one beats in seconds, bytes and growth are dropped on the way,
    which leaves O(modules * blocks^2) where the blocks of each module are alike.

    Example: "b" saves the same bytes in half the time.
        >>> seconds = {"a": np.full(4, 2.0), "b": np.full(4, 1.0)}
        >>> least_recompute(seconds, {"a": np.full(4, 8.0), "b": np.full(4, 8.0)}, lacking_bytes=40)
        {'a': 1, 'b': 4}
    """
    return LeastRecompute(recompute_s, saved_bytes, grown_bytes).for_bytes(lacking_bytes)


class LeastRecompute(Generic[Key]):
    """`least_recompute` of blocks that are asked for several numbers of bytes. Arguments: as there."""

    def __init__(
        self,
        recompute_s: Mapping[Key, Float64Array],
        saved_bytes: Mapping[Key, Float64Array],
        grown_bytes: Mapping[Key, Float64Array] | None = None,
    ) -> None:
        self._given = recompute_s, saved_bytes, grown_bytes

    def for_bytes(self, lacking_bytes: float) -> dict[Key, int] | None:
        """The choice for so many lacking bytes. Raises as `least_recompute`."""
        if not math.isfinite(lacking_bytes):
            raise ArgumentError(f"lacking_bytes is {lacking_bytes}; it must be finite.")
        if lacking_bytes <= 0:
            return dict.fromkeys(self._given[0], 0)
        return _least_of(self._tables, math.ceil(lacking_bytes))

    @cached_property
    def _tables(self) -> dict[Key, _BlockTables]:
        recompute_s, saved_bytes, grown_bytes = self._given
        grown_bytes = grown_bytes or {key: np.zeros(len(seconds)) for key, seconds in recompute_s.items()}
        return _tables_of(recompute_s, saved_bytes, grown_bytes)


def _least_of(tables: Mapping[Key, _BlockTables], needed: int) -> dict[Key, int] | None:
    """`least_recompute`, from tables and the whole bytes that are needed."""
    if len(tables) == 1:  # Each further block costs more: the first number that suffices is the cheapest.
        ((key, table),) = tables.items()
        suffices = table.saved - table.grown >= needed
        return {key: int(np.argmax(suffices))} if suffices.any() else None
    # A state is a choice for the modules so far: (cost, saved, grown). counts: its blocks of each module.
    states = np.zeros((3, 1), dtype=np.int64)
    counts = np.zeros((0, 1), dtype=np.int64)
    still_savable = sum(int(table.saved[-1]) for table in tables.values())
    if still_savable < needed:
        return None
    *others, last = tables.values()
    for table in others:
        still_savable -= int(table.saved[-1])
        joined = states[:, :, None] + np.stack(table)[:, None, :]
        joined[2] = np.maximum(states[2][:, None], table.grown[None, :])
        joined = joined.reshape(3, -1)
        # The first table is what the next one is joined with, whole: little of it is dominated.
        kept = _undominated(joined, needed, still_savable) if len(counts) else np.arange(joined.shape[1])
        previous, count = np.divmod(kept, len(table.cost))
        counts = np.concatenate([counts[:, previous], count[None]])
        states = joined[:, kept]
    if (best := _cheapest(states, last, needed)) is None:
        return None
    return {key: int(count) for key, count in zip(tables, (*counts[:, best[0]], best[1]), strict=True)}


def _tables_of(
    recompute_s: Mapping[Key, Float64Array],
    saved_bytes: Mapping[Key, Float64Array],
    grown_bytes: Mapping[Key, Float64Array],
) -> dict[Key, _BlockTables]:
    columns = {key: (recompute_s[key], saved_bytes[key], grown_bytes[key]) for key in recompute_s}
    for key, own in columns.items():
        if not len(own[0]) == len(own[1]) == len(own[2]) or not _are_sound(np.concatenate(own)):
            _raise_unsound(key, own)
    total = sum(float(np.sum(seconds)) for seconds in recompute_s.values())
    exponent = _TOTAL_BITS - math.frexp(total)[1]
    tables = {}
    for key, (seconds, saved, grown) in columns.items():
        table = np.zeros((3, len(seconds) + 1), dtype=np.int64)
        table[0, 1:] = np.rint(np.ldexp(seconds, exponent))
        table[0, 1:] = (table[0, 1:] << _COUNT_BITS) + 1
        table[1, 1:] = np.floor(saved)
        table[2, 1:] = np.ceil(grown)
        table[:2].cumsum(axis=1, out=table[:2])
        np.maximum.accumulate(table[2], out=table[2])
        tables[key] = _BlockTables(*table)
    return tables


def _are_sound(column: Float64Array) -> bool:
    """Whether all numbers are finite and none is negative. False for what is no number."""
    return bool(column.min(initial=0) >= 0 and column.max(initial=0) < math.inf)


def _raise_unsound(key: Hashable, columns: Sequence[Float64Array]) -> None:
    for name, column in zip(("recompute_s", "saved_bytes", "grown"), columns, strict=True):
        if len(column) != len(columns[0]) or not _are_sound(np.asarray(column)):
            raise ArgumentError(f"{name} of {key!r} must be {len(columns[0])} finite numbers, none of them negative.")


def _cheapest(states: Int64Array, last: _BlockTables, needed: int) -> tuple[int, int] | None:
    """The best choice for all modules: the state of the others, and the number of blocks of the last; None if no choice
    reaches `needed`. Of equal costs, the least growth wins, then the most saved.

    states: [3, num_states], as of `_undominated`.
    """
    net = states[1][:, None] + last.saved - np.maximum(states[2][:, None], last.grown)
    suffices = net >= needed
    # Each further block costs more, so that of each state the first number that suffices is the cheapest.
    count = suffices.argmax(axis=1)
    able = np.flatnonzero(suffices[np.arange(len(count)), count])
    if not len(able):
        return None
    cost = states[0][able] + last.cost[count[able]]
    best = able[cost == cost.min()]
    if len(best) > 1:
        grown = np.maximum(states[2][best], last.grown[count[best]])
        best = best[np.lexsort((-(states[1][best] + last.saved[count[best]]), grown))]
    return int(best[0]), int(count[best[0]])


def _undominated(states: Int64Array, needed: int, still_savable: int) -> Int64Array:
    """Indices of the states [3, num_states] (cost, saved, grown) that can be part of the best choice.

    1. A state must be able to reach `needed`: saved - grown + still_savable >= needed.
    2. It must cost no more than the cheapest state that reaches `needed` already.
    3. No other state may cost no more, grow no more, and save at least as much.
    """
    cost, saved, grown = states
    net = saved - grown
    cheapest_enough = cost.min(where=net >= needed, initial=np.iinfo(np.int64).max)
    able = np.flatnonzero((net >= needed - still_savable) & (cost <= cheapest_enough))
    by_cost = able[np.lexsort((grown[able], -saved[able], cost[able]))]
    kept = []
    for growth in np.unique(grown[able]):
        # Rule 3: among states with no more growth, in order of cost, only a new maximum of `saved` is not dominated.
        candidates = by_cost[grown[by_cost] <= growth]
        most_saved = np.maximum.accumulate(saved[candidates])
        is_new_maximum = np.concatenate([most_saved[:1] >= 0, most_saved[1:] > most_saved[:-1]])
        kept.append(candidates[is_new_maximum & (grown[candidates] == growth)])
    return np.concatenate(kept) if kept else by_cost


@dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes of a stage on one of its ranks if nothing is recomputed, as `cost.memory.stage_memory` counts them.

    state_bytes:    parameters, gradients and optimizer. sharding_bytes: transients of gathers and reductions.
    kept_bytes:     activations of all microbatches in flight. largest_bytes: the largest transients of any layer.
    saved_bytes:    [num_blocks] of each module: what recomputing a block saves, over all microbatches in flight.
    working_bytes:  [num_blocks] of each module: the largest transients of a layer of the block that is recomputed.
    """

    state_bytes: int
    sharding_bytes: int
    kept_bytes: int
    largest_bytes: int
    saved_bytes: Mapping[str, Float64Array]
    working_bytes: Mapping[str, Float64Array]


def stage_bytes(
    model: ModelSpec,
    unit: Unit,
    spans: Spans,
    rows: RowsOfLayer,
    taken_rows: Callable[[str], float],
    in_flight: int,
    precision: MixedPrecision,
    *,
    copies: CopiesOfLayer = lambda *_: 0.0,
    whole_rows: bool = False,
) -> StageBytes:
    """The bytes of a stage of a pipeline's `unit` that holds the blocks `spans`. O(layers).

    taken_rows: rows of an encoder that the backbone takes in, in the largest microbatch. Others: as of
                `stateless_bytes`.
    """
    tied, layers = tied_at_end(model, unit, spans), stage_layers(model, spans, {}, whole_rows=whole_rows)
    if tied is not None:
        layers = [tied.without(placed) for placed in layers]
    state = stage_memory(unit, layers, lambda *_: 0.0, 0, precision)
    stateless = stateless_bytes(model, unit, spans, rows, in_flight, precision, copies=copies, whole_rows=whole_rows)
    taken = taken_bytes(model, spans, precision.compute, by_stage=True)
    taken_in = in_flight * math.ceil(sum(size * taken_rows(name) for name, size in taken.items()))
    return replace(
        stateless,
        state_bytes=state.held_bytes + (sum(tied.state(precision)) if tied is not None else 0),
        sharding_bytes=state.transient,
        kept_bytes=stateless.kept_bytes + taken_in,
    )


def stateless_bytes(
    model: ModelSpec,
    unit: Unit,
    spans: Spans,
    rows: RowsOfLayer,
    in_flight: int,
    precision: MixedPrecision,
    *,
    copies: CopiesOfLayer = lambda *_: 0.0,
    whole_rows: bool = False,
) -> StageBytes:
    """The bytes of a stage without its state, and without what sharding that takes for a while. O(layers).

    rows:      rows of the largest microbatch in each layer. For layers that see targets only, all of them: this
               function knows how many logits exist at once.
    in_flight: the most microbatches whose activations are kept at once.
    copies:    as of `cost.memory.stage_memory`. whole_rows: as of `cost.memory.stage_layers`.
    """
    block = {name: _block_of_layer(model, name, span) for name, span in spans.items()}
    num_seen = dict.fromkeys(spans, 0)
    saved = {name: np.zeros(stop - first) for name, (first, stop) in spans.items()}
    working = {name: np.zeros(stop - first) for name, (first, stop) in spans.items()}
    kept, largest = 0, 0
    size_of = cache(
        lambda placed: (
            _layer_bytes(placed, rows(*placed[:2]) / unit.cp, unit.tp, precision),
            math.ceil(copies(*placed[:2])),
        )
    )
    everything = {name: stop - first for name, (first, stop) in spans.items()}
    for placed in stage_layers(model, spans, everything, whole_rows=whole_rows):
        name, layer, needs_input, recomputed = placed[:4]
        index = block[name][num_seen[name]]
        num_seen[name] += 1
        size, copied = size_of(placed)
        of_forward, in_buffers = size.saved + copied, 2 * copied
        if not needs_input and not layer.trainable:
            # There is no backward: activations live while the layer runs.
            largest = max(largest, of_forward + in_buffers)
            continue
        kept += of_forward
        largest = max(largest, size.gradients + in_buffers)
        if recomputed:
            again = of_forward - size.input
            saved[name][index] += in_flight * again
            working[name][index] = max(working[name][index], again + size.gradients + in_buffers)
    return StageBytes(0, 0, kept * in_flight, largest, saved, working)


def _block_of_layer(model: ModelSpec, name: str, span: tuple[int, int]) -> list[int]:
    """The block of each layer of the blocks [span[0], span[1]) of a module, counted from the first of them."""
    blocks = model.module(name).blocks[slice(*span)]
    return [index for index, block in enumerate(blocks) for _ in range(block.start, block.stop)]


def _layer_bytes(placed: StageLayer, num_rows: float, tp: int, precision: MixedPrecision) -> LayerBytes:
    layer, whole = placed.layer, LayerBytes.of(placed, num_rows, tp, precision)
    if not layer.targets_only:
        return whole
    rows_at_once = min(num_rows, MAX_LOGITS / layer.output_width)
    return whole._replace(gradients=LayerBytes.of(placed, rows_at_once, tp, precision).gradients)


@dataclass(frozen=True)
class Fit:
    """The recomputation of a rank's stages, and whether they fit.

    recompute:       recomputed blocks by stage and module.
    shortfall_bytes: memory that the peak lacks; 0 if it fits.
    """

    recompute: tuple[Mapping[str, int], ...]
    peak_bytes: float
    shortfall_bytes: float


def fit_rank(
    stages: Sequence[StageBytes],
    recompute_s: Sequence[Mapping[str, Float64Array]],
    capacity_bytes: float,
    mode: RecomputeMode = "least",
) -> Fit:
    """The recomputation of a rank that runs these stages.

    A rank runs one stage at a time, so that only the largest transients count.
    recompute_s: [num_blocks] of each module of each stage (`planner.job.BlockCosts`).
    mode:        "least": the least that fits, or all where even that does not fit; "none" and "full" as they say.
    """
    # 1. The peak without recomputation: base + idle.
    base = sum(stage.state_bytes + stage.kept_bytes for stage in stages)
    idle = max(stage.sharding_bytes + stage.largest_bytes for stage in stages)
    # 2. What each block saves, adds to the transients, and takes; by stage and module.
    saved = {(n, name): column for n, stage in enumerate(stages) for name, column in stage.saved_bytes.items()}
    grown = {
        (n, name): np.maximum(stage.sharding_bytes + column - idle, 0)
        for n, stage in enumerate(stages)
        for name, column in stage.working_bytes.items()
    }
    seconds = {(n, name): recompute_s[n][name] for n, name in saved}
    # 3. The choice.
    every = {key: len(column) if column.any() else 0 for key, column in saved.items()}
    chosen = dict.fromkeys(saved, 0) if mode == "none" else every
    if mode == "least":
        chosen = least_recompute(seconds, saved, base + idle - capacity_bytes, grown) or every
    # 4. The peak with it.
    total_saved = sum(float(saved[key][:count].sum()) for key, count in chosen.items())
    growth = max((float(grown[key][:count].max(initial=0.0)) for key, count in chosen.items()), default=0.0)
    peak_bytes = base + idle - total_saved + growth
    recompute = tuple({name: chosen[n, name] for name in stage.saved_bytes} for n, stage in enumerate(stages))
    return Fit(recompute, peak_bytes, max(peak_bytes - capacity_bytes, 0.0))
