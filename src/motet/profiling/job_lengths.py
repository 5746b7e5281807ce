"""The lengths of a job's items and the rows of its microbatches: where a profile spends its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE, BatchLengths, total_lengths
from motet.data.groups import group_caps
from motet.models.mllm import MLLM
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe import Recipe

_NUM_EXAMPLES = 4096
"""So many examples of a job tell its lengths."""
_RARE = 0.02
"""The share of items that are shorter than what is measured."""
_LARGER = 2.0
"""Microbatches of so many times the mean rows are measured: few are the mean one, and some Plans have larger ones."""


class AskedLengths(NamedTuple):
    """What a job asks of a module. shortest, longest: lengths of items. rows: of its large microbatches."""

    shortest: int
    longest: int
    rows: int

    def among(self, lengths: Int64Array) -> Int64Array:
        """Those of some lengths, ascending, that a job has: from the last one below its shortest to the longest."""
        inside = lengths[lengths <= max(self.longest, int(lengths[0]))]
        first = max(int(np.searchsorted(inside, self.shortest, side="right")) - 1, 0)
        return inside[first:]


def asked_lengths(recipe: Recipe, model: MLLM, num_ranks: int) -> dict[str, AskedLengths]:
    """By module what a recipe's data ask for, on so many ranks, by their indexes.

    model: may be one layer deep. Raises UserError for data that cannot be read.
    """
    dataset = open_dataset(recipe, recipe.data.train, recipe.vocabulary(), model, lambda sentence: None)
    count = min(dataset.num_examples, _NUM_EXAMPLES)
    drawn = np.unique(np.linspace(0, dataset.num_examples - 1, count).round().astype(np.int64))
    examples, caps = dataset.batch_lengths(drawn, 1), None
    if recipe.data.group is not None:
        caps = group_caps(
            recipe.data.group, {name: total_lengths(examples, name) for name in (*examples.items, BACKBONE)}
        )
    return of_examples(examples, _examples_a_microbatch(recipe, num_ranks), caps)


def of_examples(
    examples: BatchLengths, examples_a_microbatch: float, caps: Mapping[str, int] | None = None
) -> dict[str, AskedLengths]:
    """By module what some examples ask for. caps: by module, of microbatches that are groups under them."""
    lengths = {name: items.length for name, items in examples.items.items() if items.num_items}
    asked = {}
    for name, length in {**lengths, BACKBONE: examples.sequence}.items():
        rows = _LARGER * examples_a_microbatch * length.sum() / max(examples.num_examples, 1)
        if caps and name in caps:
            rows = caps[name]
        asked[name] = AskedLengths(
            int(np.quantile(length, _RARE)), int(length.max()), max(int(rows), int(length.max()))
        )
    return asked


def _examples_a_microbatch(recipe: Recipe, num_ranks: int) -> float:
    return recipe.run.batch_size / (recipe.run.microbatches * num_ranks)
