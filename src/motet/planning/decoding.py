"""What decoding asks of a job's CPU cores, beside its best Plan: how many, and what steps wait with those it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.words import counted_words
from motet.cost.decoding import DecodingCost, DecodingLoad
from motet.cost.profile import read_profile
from motet.data.examples import Examples, files_by_codec
from motet.data.videos import amount_of
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.sources import example_weights, training_data

_NUM_EXAMPLES = 4096
"""So many examples tell what decoding the others takes."""


@dataclass(frozen=True)
class DecodingNeed:
    """What the media of a recipe ask of CPU cores.

    core_s: seconds of one core that those of a step take. workers: of each rank. kind: of worker, in words.
    """

    core_s: float
    workers: int
    kind: str

    def load(self, step_s: float, num_ranks: int) -> DecodingLoad:
        """What they ask beside a Plan of this step, on so many ranks."""
        return DecodingLoad(self.core_s, step_s, max(self.workers, 1) * num_ranks)

    def figures(self, step_s: float, num_ranks: int) -> dict[str, float]:
        """For JSON: cores so that no step waits, and what each step waits with the workers of the recipe."""
        load = self.load(step_s, num_ranks)
        return {
            "core_s": load.core_s,
            "cores": load.cores,
            "workers": load.num_workers,
            "stall_s": load.stall_s,
            "stall_share": load.stall_share,
        }

    def words(self, step_s: float, num_ranks: int) -> str:
        """The same as a sentence."""
        load = self.load(step_s, num_ranks)
        waits = (
            f"each step waits {load.stall_s:.3g} s for them ({load.stall_share:.0%} of it)"
            if load.stall_s > 0
            else "no step waits for them"
        )
        return (
            f"Decoding takes {load.core_s:.3g} s of a core a step, so {counted_words(load.cores, 'CPU core')} "
            f"{'keeps' if load.cores == 1 else 'keep'} every rank computing; with the recipe's {load.num_workers:,} "
            f"{self.kind} ({self.workers} a rank), {waits}."
        )


def decoding_need(path: Path, overrides: Sequence[str], profile: Path | None) -> DecodingNeed | None:
    """The need of a recipe's media; None without a profile that has decoding, or without files.

    Raises UserError for what is wrong with the recipe's data.
    """
    if profile is None or not (measured := read_profile(profile).decoding):
        return None
    recipe = read_job_recipe(path, overrides).recipe
    if recipe is None or recipe.is_drawn or recipe.data.group is not None:
        return None
    dataset, _ = training_data(recipe)
    core_s = core_seconds(dataset, DecodingCost(measured), example_weights(recipe, dataset)) * recipe.run.batch_size
    kind = "actors" if recipe.data.service == "ray" else "workers"
    return DecodingNeed(core_s, recipe.data.num_workers, kind)


def core_seconds(dataset: Examples, cost: DecodingCost, weight: Float64Array | None = None) -> float:
    """Seconds of one core that the media of an example take, in the mean.

    weight: float64 [num_examples], how often training takes each example, in any unit; None if all equally often.
    """
    total = 0.0
    for (phase, codec), refs in files_by_codec(dataset, _NUM_EXAMPLES, weight).items():
        seconds = cost.seconds(phase, codec, np.array([amount_of(ref) for ref in refs], dtype=np.float64))
        total += 0.0 if seconds is None else float(seconds.sum())
    return total / (min(dataset.num_examples, _NUM_EXAMPLES) if weight is None else _NUM_EXAMPLES)
