"""What a step's phases would cost on each rank, unbalanced, with a balanced backbone, and with every phase balanced.

Batches are drawn from the lengths with a fixed seed and placed as the trainer's orchestrator places them: unbalanced,
an example and its media are computed on its home rank; with the backbone balanced, media go where their example goes;
with every phase balanced, each encoder's items are placed by themselves. Backbone and image encoders pack (cost: the
sum of lengths), audio encoders pad (cost: clips times the longest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.analyze.lengths import Lengths
from motet.balance import Cost, Packed, Padded, assign, score
from motet.core.assignment import Assignment
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, home_ranks
from motet.data.media import AUDIO, IMAGE

Mode = Literal["off", "backbone", "all"]
MODES: tuple[Mode, ...] = ("off", "backbone", "all")
MODE_NAMES: dict[Mode, str] = {"off": "unbalanced", "backbone": "backbone only", "all": "every phase"}
COSTS: dict[str, Cost] = {BACKBONE: Packed(), IMAGE: Packed(), AUDIO: Padded()}
Mix = Literal["rows", "even"]


@dataclass(frozen=True, eq=False)
class PhaseLoads:
    """Loads of one phase over the drawn batches, by mode.

    loads:  int64 [num_batches, num_ranks].
    bounds: int64 [num_batches], below which no placement of whole items can bring the maximum load; 0 where the phase
            has nothing to do in a batch.
    """

    loads: dict[Mode, NDArray[np.int64]]
    bounds: NDArray[np.int64]

    def max_over_mean(self, mode: Mode) -> NDArray[np.float64]:
        """Per batch with such items, float64 [n]: 1 is perfect; at 2, ranks wait for half of the phase on average."""
        loads = self.loads[mode][self.bounds > 0]
        ratios: NDArray[np.float64] = loads.max(axis=1) / loads.mean(axis=1)
        return ratios

    def max_over_bound(self, mode: Mode) -> NDArray[np.float64]:
        """Per batch with such items, float64 [n]: how much longer the phase takes than it would at its bound."""
        busy = self.bounds > 0
        ratios: NDArray[np.float64] = self.loads[mode][busy].max(axis=1) / self.bounds[busy]
        return ratios


def sample_loads(
    lengths: Lengths, *, num_ranks: int, batch_size: int, num_batches: int, seed: int, mix: Mix
) -> dict[str, PhaseLoads]:
    """Loads of each phase that occurs in the batches, backbone first. O(num_batches * batch_size log batch_size)."""
    phases = (BACKBONE, *lengths.phases)
    loads: dict[str, dict[Mode, list[NDArray[np.int64]]]] = {phase: {mode: [] for mode in MODES} for phase in phases}
    bounds: dict[str, list[int]] = {phase: [] for phase in phases}
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        batch = take(lengths.batch, _draw(lengths, batch_size, rng, mix), num_ranks)
        for mode in MODES:
            for phase, assignment in place(batch, phases, num_ranks, mode).items():
                loads[phase][mode].append(assignment.loads)
                if mode == "all":
                    bounds[phase].append(assignment.bound)
    return {
        phase: PhaseLoads({mode: np.stack(rows) for mode, rows in loads[phase].items()}, np.array(bounds[phase]))
        for phase in phases
        if any(bounds[phase])
    }


def place(batch: BatchLengths, phases: tuple[str, ...], num_ranks: int, mode: Mode) -> dict[str, Assignment]:
    """The placement of each phase in one mode."""
    if mode == "off":
        backbone = score(batch.home, batch.sequence, num_ranks, COSTS[BACKBONE])
    else:
        backbone = assign(batch.sequence, num_ranks, COSTS[BACKBONE])
    placed = {BACKBONE: backbone}
    for phase in phases[1:]:
        items = batch.items[phase]
        if mode == "all":
            placed[phase] = assign(items.length, num_ranks, COSTS[phase])
        else:
            placed[phase] = score(backbone.ranks[items.example], items.length, num_ranks, COSTS[phase])
    return placed


def take(batch: BatchLengths, examples: NDArray[np.int64], num_ranks: int) -> BatchLengths:
    """Some examples, in the order given; int64 [n], repeats allowed."""
    items = {}
    for name, column in batch.items.items():
        # Items are in order of their examples: those of one example stand together.
        first, end = (np.searchsorted(column.example, examples, side=side) for side in ("left", "right"))
        counts = end - first
        owner = np.repeat(np.arange(len(examples)), counts)
        chosen = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        items[name] = ItemLengths(owner, column.length[chosen], column.num_tokens[chosen])
    return BatchLengths(
        batch.sequence[examples], batch.num_targets[examples], home_ranks(len(examples), num_ranks), items
    )


def _draw(lengths: Lengths, batch_size: int, rng: np.random.Generator, mix: Mix) -> NDArray[np.int64]:
    if mix == "rows":
        return rng.integers(0, lengths.batch.num_examples, batch_size)
    kinds = lengths.kinds()
    present = np.unique(kinds)
    chosen = rng.choice(present, batch_size)
    drawn = np.zeros(batch_size, dtype=np.int64)
    for kind in present:
        drawn[chosen == kind] = rng.choice(np.flatnonzero(kinds == kind), int((chosen == kind).sum()))
    return drawn
