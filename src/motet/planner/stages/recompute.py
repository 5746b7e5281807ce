"""Which activations are recomputed: the least that fits memory, per rank, stage and module (OmniBal section 4.3).

From the seconds that recomputing each block adds to backward and the bytes that it spares. Of a module's blocks in a
stage the first n are recomputed, so what is chosen is n for each: a knapsack, solved exactly, in whole units. OmniBal
searches the number of layers of each stage by trial; what it calls adaptive is the solution for each stage by itself.
What is recomputed comes back once, for the layer that runs, on top of what the stages hold (`cost/memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.core.spec import Layer, ModelSpec
from motet.cost.memory import LayerBytes, MixedPrecision, RowsOfLayer, Spans, stage_layers, stage_memory
from motet.simulate.predict.memory import MAX_LOGITS

Key = TypeVar("Key", bound=Hashable)
RecomputeMode = Literal["none", "least", "full"]

_TOTAL_BITS = 40
"""Seconds are told apart to this many bits of all of them together; below are the numbers of blocks, so that of equal
seconds the fewest blocks win."""
_COUNT_BITS = 20


def least_recompute(
    recompute_s: Mapping[Key, Float64Array],
    saved_bytes: Mapping[Key, Float64Array],
    lacking_bytes: float,
    grown_bytes: Mapping[Key, Float64Array] | None = None,
) -> dict[Key, int] | None:
    """Of how many of its first blocks each module is recomputed, so that memory suffices and the least time is added.

    recompute_s, saved_bytes: [num_blocks] of each module (or stage and module): what recomputing a block adds to
                           backward, and what it saves, over all microbatches in flight.
    lacking_bytes:         what must be spared; where nothing lacks, nothing is recomputed.
    grown_bytes:           [num_blocks] of each: by how much transients are larger where the block is recomputed; the
                           largest of all adds to what lacks. By default nothing.
    Of equal seconds, the fewest blocks. None: all of it does not suffice. Raises ArgumentError for columns that differ
    in length and for what is negative or not finite. O(blocks^modules) at worst; what another choice beats in seconds,
    bytes and growth is dropped on the way, which leaves O(modules * blocks^2) where the blocks of each are alike.
    """
    if not math.isfinite(lacking_bytes):
        raise ArgumentError(f"lacking_bytes is {lacking_bytes}; it must be finite.")
    if lacking_bytes <= 0:
        return dict.fromkeys(recompute_s, 0)
    columns = _prefixes(
        recompute_s, saved_bytes, grown_bytes or {key: np.zeros(len(own)) for key, own in recompute_s.items()}
    )
    state = np.zeros((3, 1), dtype=np.int64)
    counts = np.zeros((0, 1), dtype=np.int64)
    left = sum(int(freed[-1]) for _, freed, _ in columns.values())
    needed = math.ceil(lacking_bytes)
    for cost, freed, grown in columns.values():
        left -= int(freed[-1])
        joined = state[:, :, None] + np.stack([cost, freed, grown])[:, None, :]
        joined[2] = np.maximum(state[2][:, None], grown[None, :])
        kept = _undominated(joined.reshape(3, -1), needed, left)
        before, count = np.divmod(kept, len(cost))
        counts = np.concatenate([counts[:, before], count[None]])
        state = joined.reshape(3, -1)[:, kept]
    if not counts.shape[1]:
        return None
    best = int(np.argmin(state[0]))
    return {key: int(count) for key, count in zip(columns, counts[:, best], strict=True)}


def _prefixes(
    recompute_s: Mapping[Key, Float64Array],
    saved_bytes: Mapping[Key, Float64Array],
    grown_bytes: Mapping[Key, Float64Array],
) -> dict[Key, tuple[Int64Array, ...]]:
    """Of the first 0, 1, ... blocks: what is minimised, bytes spared (rounded down) and growth (rounded up)."""
    total = 0.0
    for key, seconds in recompute_s.items():
        for name, column in (("recompute_s", seconds), ("saved_bytes", saved_bytes[key]), ("grown", grown_bytes[key])):
            if len(column) != len(seconds) or not np.isfinite(column).all() or (np.asarray(column) < 0).any():
                raise ArgumentError(f"{name} of {key!r} must be {len(seconds)} finite numbers, none of them negative.")
        total += float(np.sum(seconds))
    exponent = _TOTAL_BITS - int(np.frexp(total)[1])
    zero = np.zeros(1, dtype=np.int64)
    found = {}
    for key, seconds in recompute_s.items():
        units = np.rint(np.ldexp(np.asarray(seconds, dtype=np.float64), exponent)).astype(np.int64)
        cost = (units << _COUNT_BITS) + 1
        spared = np.floor(saved_bytes[key]).astype(np.int64)
        grown = np.maximum.accumulate(np.ceil(grown_bytes[key])).astype(np.int64)
        found[key] = tuple(np.concatenate([zero, column]) for column in (cost.cumsum(), spared.cumsum(), grown))
    return found


def _undominated(states: Int64Array, needed: int, left: int) -> Int64Array:
    """Numbers of the states [3, num_states] (cost, freed, grown) that can be part of the best choice.

    That is: with all that is left to be freed they reach `needed`, they cost no more than one that reaches it already,
    and no other beats them: by growth, smallest first, of those with no more growth, a state must free more than all
    that cost no more.
    """
    gained = states[1] - states[2]
    limit = states[0].min(where=gained >= needed, initial=np.iinfo(np.int64).max)
    able = np.flatnonzero((gained >= needed - left) & (states[0] <= limit))
    cost, freed, grown = states[:, able]
    order = able[np.lexsort((grown, -freed, cost))]
    kept = []
    for level in np.unique(grown):
        below = order[states[2, order] <= level]
        most = np.maximum.accumulate(states[1, below])
        best = np.concatenate([most[:1] >= 0, most[1:] > most[:-1]])
        kept.append(below[best & (states[2, below] == level)])
    return np.concatenate(kept) if kept else order


@dataclass(frozen=True, eq=False)
class StageBytes:
    """What a stage takes on one of its ranks when nothing is recomputed, as `cost.memory.stage_memory` counts it.

    state_bytes: parameters, gradients, optimizer. sharding_bytes: transients of gathers and reductions.
    kept_bytes: activations of all microbatches in flight. largest_bytes: transients of the layer that has the largest.
    saved_bytes, working_bytes: [num_blocks] of each module of the stage: what recomputing a block spares of all in
                                 flight, and the transients of its layer while it is recomputed.
    """

    state_bytes: int
    sharding_bytes: int
    kept_bytes: int
    largest_bytes: int
    saved_bytes: Mapping[str, Float64Array]
    working_bytes: Mapping[str, Float64Array]


def stage_bytes(
    model: ModelSpec, unit: Unit, spans: Spans, rows: RowsOfLayer, in_flight: int, precision: MixedPrecision
) -> StageBytes:
    """rows: of the largest microbatch; of what sees targets only, all of them: how many logits exist at once is
    known here. in_flight: microbatches of which activations are kept at once, at most. O(layers).
    """
    held = stage_memory(unit, stage_layers(model, spans, {}), lambda *_: 0.0, 0, precision)
    kept, largest = 0, 0
    spared: dict[str, list[float]] = {name: [] for name in spans}
    working: dict[str, list[float]] = {name: [] for name in spans}
    sizes: dict[tuple[str, Layer], LayerBytes] = {}
    starts = {name: {block.start for block in model.module(name).blocks} for name in spans}
    place = {name: model.module(name).blocks[first].start for name, (first, _) in spans.items()}
    everything = {name: stop - first for name, (first, stop) in spans.items()}
    for name, layer, needs_input, recomputed in stage_layers(model, spans, everything):
        if place[name] in starts[name]:
            spared[name].append(0.0)
            working[name].append(0.0)
        place[name] += 1
        if (size := sizes.get((name, layer))) is None:
            size = sizes[name, layer] = _layer_bytes(layer, rows(name, layer) / unit.cp, unit.tp, precision)
        if not needs_input and not layer.trainable:
            largest = max(largest, size.saved)
            continue
        kept += size.saved
        largest = max(largest, size.gradients)
        if recomputed:
            spared[name][-1] += in_flight * (size.saved - size.input)
            working[name][-1] = max(working[name][-1], size.saved - size.input + size.gradients)
    return StageBytes(
        held.held_bytes,
        held.transient,
        kept * in_flight,
        largest,
        {name: np.array(column) for name, column in spared.items()},
        {name: np.array(column) for name, column in working.items()},
    )


def _layer_bytes(layer: Layer, num_rows: float, tp: int, precision: MixedPrecision) -> LayerBytes:
    whole = LayerBytes.of(layer, num_rows, tp, precision)
    if not layer.targets_only:
        return whole
    at_once = min(num_rows, MAX_LOGITS / layer.output_width)
    return whole._replace(gradients=LayerBytes.of(layer, at_once, tp, precision).gradients)


@dataclass(frozen=True)
class Fit:
    """recompute: per stage and module, of how many blocks.

    shortfall_bytes: what the peak lacks where even full recomputation does not suffice, or none is allowed; 0: it fits.
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
    """What is recomputed on a rank with these stages: the least that fits, or all or none of it where that is asked.

    recompute_s: of each stage, [num_blocks] of its modules (`planner.job.BlockCosts`). A rank computes one stage at a
    time: the largest transients count once.
    """
    base = sum(stage.state_bytes + stage.kept_bytes for stage in stages)
    idle = max(stage.sharding_bytes + stage.largest_bytes for stage in stages)
    spared = {(n, name): column for n, stage in enumerate(stages) for name, column in stage.saved_bytes.items()}
    grown = {
        (n, name): np.maximum(stage.sharding_bytes + column - idle, 0)
        for n, stage in enumerate(stages)
        for name, column in stage.working_bytes.items()
    }
    seconds = {(n, name): recompute_s[n][name] for n, name in spared}
    every = {key: len(column) if column.any() else 0 for key, column in spared.items()}
    chosen = dict.fromkeys(spared, 0) if mode == "none" else every
    if mode == "least":
        chosen = least_recompute(seconds, spared, base + idle - capacity_bytes, grown) or every
    freed = sum(float(spared[key][:count].sum()) for key, count in chosen.items())
    growth = max((float(grown[key][:count].max(initial=0.0)) for key, count in chosen.items()), default=0.0)
    peak_bytes = base + idle - freed + growth
    recompute = tuple({name: chosen[n, name] for name in stage.saved_bytes} for n, stage in enumerate(stages))
    return Fit(recompute, peak_bytes, max(peak_bytes - capacity_bytes, 0.0))
