"""What decoding asks of a job's CPU cores, beside its best Plan: how many, and what steps wait with those it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from motet.cost.decoding import DecodingCost, DecodingLoad
from motet.cost.profile import read_profile
from motet.data.examples import Examples, files_by_codec
from motet.data.media import amount_of
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.sources import training_data

_NUM_EXAMPLES = 4096
"""So many examples tell what decoding the others takes."""


def decoding_in_words(path: Path, overrides: Sequence[str], profile: Path | None, step_s: float, ranks: int) -> str:
    """A sentence on the cores that a recipe's media need; "" without a profile that has decoding, or without files.

    step_s: of the Plan, on `ranks` ranks. Raises UserError for what is wrong with the recipe's data.
    """
    if profile is None or not (measured := read_profile(profile).decoding):
        return ""
    recipe = read_job_recipe(path, overrides).recipe
    if recipe is None or recipe.is_drawn or recipe.data.group is not None:
        return ""
    dataset, _ = training_data(recipe)
    core_s = core_seconds(dataset, DecodingCost(measured)) * recipe.run.batch_size
    load = DecodingLoad(core_s, step_s, max(recipe.data.num_workers, 1) * ranks)
    kind = "actors" if recipe.data.service == "ray" else "workers"
    waits = (
        f"each step waits {load.stall_s:.3g} s for them ({load.stall_share:.0%} of it)"
        if load.stall_s > 0
        else "no step waits for them"
    )
    return (
        f"Decoding takes {load.core_s:.3g} s of a core a step, so {load.cores:,} CPU cores keep every rank computing; "
        f"with the recipe's {load.num_workers:,} {kind} ({recipe.data.num_workers} a rank), {waits}."
    )


def core_seconds(dataset: Examples, cost: DecodingCost) -> float:
    """Seconds of one core that the media of an example take, in the mean."""
    total = 0.0
    for (phase, codec), refs in files_by_codec(dataset, _NUM_EXAMPLES).items():
        seconds = cost.seconds(phase, codec, np.array([amount_of(ref) for ref in refs], dtype=np.float64))
        total += 0.0 if seconds is None else float(seconds.sum())
    return total / min(dataset.num_examples, _NUM_EXAMPLES)
