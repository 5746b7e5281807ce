"""After a real step ran out of memory: how much more to recompute, by measured bytes (OmniBal section 4.3, Steps 1-4).

1. Everything is recomputed, and the peak is measured.
2. One module at a time keeps one block, then a quarter of its blocks more, and the peaks are measured. (The first
   block that is kept adds little: in its place a recomputed one would be held while its backward pass runs.)
3. The difference is what these blocks save. Over what the memory model predicts for them, it is the module's
   correction.
4. The least recomputation that fits by the corrected model is run. While a rank runs out of memory, less memory is
   taken to be there: the middle between what failed and the peak of Step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from motet.core.arrays import Float64Array
from motet.core.plan import Plan
from motet.core.words import size_words
from motet.planner.data_parallel.loads import assigned_load
from motet.planner.data_parallel.recomputation import block_seconds
from motet.planner.job import Job
from motet.planner.stages.recompute import least_recompute

RunWith = Callable[[Mapping[str, int]], int | None]
"""Numbers of recomputed blocks by module -> the peak bytes of the fullest rank in real steps; None: out of memory."""


@dataclass(frozen=True, eq=False)
class BlockFigures:
    """What the memory model predicts for the blocks of each module on the fullest rank, [num_blocks] each.

    recompute_s: seconds that recomputing a block adds. saved_bytes: what it saves; 0 where backward needs nothing.
    capacity_bytes: what a rank may fill.
    """

    recompute_s: Mapping[str, Float64Array]
    saved_bytes: Mapping[str, Float64Array]
    capacity_bytes: int

    @classmethod
    def of(cls, job: Job, plan: Plan) -> BlockFigures:
        """The figures of a Plan of data parallelism."""
        load = assigned_load(job, plan)
        return cls(
            {name: block_seconds(module) for name, module in load.modules.items()},
            {name: stage.saved_bytes[name] for name, stage in load.stages.items()},
            job.capacity_bytes,
        )

    @property
    def num_blocks(self) -> dict[str, int]:
        """All blocks of each module."""
        return {name: len(saved) for name, saved in self.saved_bytes.items()}

    @property
    def every(self) -> dict[str, int]:
        """All blocks whose recomputation saves anything, by module."""
        return {name: len(saved) for name, saved in self.saved_bytes.items() if saved.any()}


@dataclass(frozen=True)
class Refitted:
    """Recomputation that ran, after less had run out of memory.

    recompute:   recomputed blocks by module. peak_bytes: measured with it.
    corrections: by module, measured over predicted bytes that a block saves; a module that could not be measured is
                 left out, and its prediction stands.
    num_failed:  how often a rank ran out of memory on the way, the first time included.
    """

    recompute: Mapping[str, int]
    peak_bytes: int
    corrections: Mapping[str, float]
    num_failed: int

    def __str__(self) -> str:
        blocks = ", ".join(f"{count} of {name}" for name, count in self.recompute.items() if count)
        factors = ", ".join(f"{factor:.2g} times in {name}" for name, factor in self.corrections.items())
        measured = f" A block saves, measured over predicted: {factors}." if factors else ""
        times = "once" if self.num_failed == 1 else f"{self.num_failed} times"
        return (
            f"It ran out of memory {times} in real steps, and runs with more recomputation: blocks {blocks}, with a "
            f"measured peak of {size_words(self.peak_bytes)}.{measured}"
        )


def recompute_more(run: RunWith, figures: BlockFigures, failed: Mapping[str, int]) -> Refitted | None:
    """The least recomputation that runs, for a Plan that ran out of memory with the numbers `failed`.

    None: a rank runs out of memory with everything recomputed. O(modules + log(blocks)) runs.
    """
    # Step 1.
    every = figures.every
    floor_bytes = run(every)
    if floor_bytes is None:
        return None
    # Steps 2 and 3.
    corrections: dict[str, float] = {}
    for name, count in every.items():
        most, fewer = count - 1, count - 1 - max(count // 4, 1)
        predicted = float(figures.saved_bytes[name][max(fewer, 0) : most].sum())
        if fewer < 0 or not predicted or (one_bytes := run({**every, name: most})) is None:
            continue
        if (more_bytes := run({**every, name: fewer})) is not None:
            corrections[name] = max(more_bytes - one_bytes, 0) / predicted
    saved = {name: figures.saved_bytes[name] * corrections.get(name, 1.0) for name in every}
    seconds = {name: figures.recompute_s[name] for name in every}
    most_bytes = floor_bytes + sum(float(column.sum()) for column in saved.values())

    def peak_of(numbers: Mapping[str, int]) -> float:
        return most_bytes - sum(float(column[: numbers.get(name, 0)].sum()) for name, column in saved.items())

    # Step 4.
    numbers, limit_bytes, num_failed = failed, float(figures.capacity_bytes), 1
    while True:
        limit_bytes = min(limit_bytes, (peak_of(numbers) + floor_bytes) / 2)
        chosen = least_recompute(seconds, saved, most_bytes - limit_bytes) or every
        # Of a module that was measured to save nothing, the model would never recompute a block.
        numbers = every if chosen == numbers else chosen
        if numbers == every:
            return Refitted(every, floor_bytes, corrections, num_failed)
        peak_bytes = run(numbers)
        if peak_bytes is not None:
            return Refitted(numbers, peak_bytes, corrections, num_failed)
        num_failed += 1
