"""What decoding asks of a job's CPU cores, beside its best Plan: how many, and what steps wait with those it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Plan
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

    core_s: seconds of one core that those of a step take, each decoded once, by module. workers: of each rank.
    kind: of worker, in words.
    """

    core_s: Mapping[str, float]
    workers: int
    kind: str

    def load(self, step_s: float, plan: Plan) -> DecodingLoad:
        """What they ask beside a Plan whose step takes step_s."""
        core_s = sum(seconds * num_decoding(plan, name) for name, seconds in self.core_s.items())
        return DecodingLoad(core_s, step_s, max(self.workers, 1) * plan.cluster.num_ranks)

    def figures(self, step_s: float, plan: Plan) -> dict[str, float]:
        """For JSON: cores so that no step waits, and what each step waits with the workers of the recipe."""
        load = self.load(step_s, plan)
        return {
            "core_s": load.core_s,
            "cores": load.cores,
            "workers": load.num_workers,
            "stall_s": load.stall_s,
            "stall_share": load.stall_share,
        }

    def words(self, step_s: float, plan: Plan) -> str:
        """The same as a sentence."""
        load = self.load(step_s, plan)
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


def num_decoding(plan: Plan, module: str) -> int:
    """How many ranks decode each item of a module: those that share its products, of each stage with a copy of it."""
    unit = plan.unit_of(module)
    return unit.tp * (unit.pp if module in unit.replicated else 1)


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
    of_example = core_seconds(dataset, DecodingCost(measured), example_weights(recipe, dataset))
    kind = "actors" if recipe.data.service == "ray" else "workers"
    core_s = {name: seconds * recipe.run.batch_size for name, seconds in of_example.items()}
    return DecodingNeed(core_s, recipe.data.num_workers, kind)


def core_seconds(dataset: Examples, cost: DecodingCost, weight: Float64Array | None = None) -> dict[str, float]:
    """Seconds of one core that the media of an example take, in the mean, by module.

    weight: float64 [num_examples], how often training takes each example, in any unit; None if all equally often.
    """
    totals: dict[str, float] = {}
    for (phase, codec), refs in files_by_codec(dataset, _NUM_EXAMPLES, weight).items():
        seconds = cost.seconds(phase, codec, np.array([amount_of(ref) for ref in refs], dtype=np.float64))
        totals[phase] = totals.get(phase, 0.0) + (0.0 if seconds is None else float(seconds.sum()))
    count = min(dataset.num_examples, _NUM_EXAMPLES) if weight is None else _NUM_EXAMPLES
    return {phase: total / count for phase, total in totals.items()}
