"""The data of a recipe with `data.group`, in the groups of its first epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.workload import BACKBONE, Workload, total_lengths
from motet.data.groups import GroupedOrder, group_caps
from motet.train.recipe.recipe import Recipe


def in_groups(recipe: Recipe, workload: Workload) -> Workload:
    """The examples of a workload in the groups that training makes of them in its first epoch.

    Raises UserError for caps that do not fit the model or the lengths.
    """
    if workload.weight is not None:
        raise UserError(
            f"data.group makes groups of examples, and {workload.source} has only how often they are drawn."
        )
    totals = _totals(recipe, workload)
    epoch = GroupedOrder(totals, caps_of(recipe, workload), recipe.data.seed).epoch(0)
    group = np.repeat(np.arange(epoch.num_groups), np.diff(epoch.offsets))
    return replace(workload, examples=replace(workload.examples.take(epoch.items), group=group))


def caps_of(recipe: Recipe, workload: Workload) -> dict[str, int]:
    """The caps of a recipe with `data.group`, on its data. Raises UserError as `group_caps` does."""
    assert recipe.data.group is not None, "a recipe without groups"
    return group_caps(recipe.data.group, _totals(recipe, workload))


def examples_a_group(workload: Workload) -> int:
    """The mean number of examples in a group of a workload, rounded, at least 1."""
    assert workload.examples.group is not None, "a workload without groups"
    return max(round(workload.examples.num_examples / (int(workload.examples.group[-1]) + 1)), 1)


def _totals(recipe: Recipe, workload: Workload) -> dict[str, Int64Array]:
    names = [*recipe.modules.encoders, *recipe.modules.generators, BACKBONE]
    if missing := [name for name in names[:-1] if name not in workload.examples.items]:
        raise UserError(f"data.group needs lengths of {', '.join(missing)}, which {workload.source} does not have.")
    return {name: total_lengths(workload.examples, name) for name in names}
