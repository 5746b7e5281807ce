"""`motet analyze RECIPE.toml`: the lengths of a recipe's data, with the costs that its training balances."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from motet.analyze import AnalysisSubject
from motet.analyze.lengths import LENGTH_UNITS, Lengths
from motet.balance import StepCosts
from motet.core.cluster import Link
from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.data.left_out import describe_left_out
from motet.planning.groups import examples_a_group, in_groups
from motet.planning.sources import example_weights, training_data
from motet.train.balancing import recipe_costs
from motet.train.recipe.reading import read_recipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe


def read_subject(path: Path, overrides: Sequence[str] = ()) -> tuple[AnalysisSubject, int]:
    """The data with their costs, and the number of examples that training balances together, or of a step of groups.

    Raises UserError for a recipe that is wrong or has no data.
    """
    if not {"data", "workload"} & read_recipe(path, overrides).tables.keys():
        raise UserError(
            f"{path} has neither [data] nor [workload] to analyse; name a training recipe, a manifest or a table of "
            "lengths."
        )
    recipe = load_recipe(path, overrides, trains=False)
    dataset, model = training_data(recipe)
    costs = recipe_costs(recipe, model, _device_type(recipe))
    left_out = dataset.left_out
    lengths = Lengths(
        str(path),
        dataset.batch_lengths(np.arange(dataset.num_examples), 1),
        (_speed_words(recipe, costs),),
        describe_left_out(left_out, dataset.num_in_manifests) if left_out else "",
        example_weights(recipe, dataset),
        {name: LENGTH_UNITS.get(recipe.modules.modality(name), "length") for name in dataset.transforms},
        frozenset(name for name in dataset.transforms if not dataset.takes_rows(name)),
    )
    subject = AnalysisSubject(lengths, costs, _COST_WORDS[recipe.balance.cost])
    if recipe.data.group is None:
        return subject, recipe.run.batch_size // recipe.run.microbatches
    groups = in_groups(recipe, lengths.workload())
    return subject, recipe.run.batch_size * examples_a_group(groups)


_COST_WORDS = {
    "flops": "Balanced on the operations of the recipe's model, forward and backward as it trains.",
    "length": 'Balanced on lengths; with balance.cost = "flops", on the operations of the recipe\'s model.',
    "profile": "Balanced on the times of the recipe's model that motet profile measured.",
}


def _device_type(recipe: Recipe) -> str:
    """The device of the ranks that the recipe is for; a GPU if it does not say."""
    stated = recipe.run.device if recipe.cluster is None else recipe.cluster.device
    return "cpu" if "cpu" in (stated, recipe.run.device) else "cuda"


def _link_words(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:,.4g} GB/s a rank after {link.latency_s * 1e6:,.4g} microseconds"


def _speed_words(recipe: Recipe, costs: StepCosts) -> str:
    network = costs.times.network
    exchanged = f"an exchange at {_link_words(network.intra_node)}"
    if network.ranks_per_node is not None:
        exchanged += (
            f", between nodes of {counted_words(network.ranks_per_node, 'rank')} at {_link_words(network.inter_node)}"
        )
    if recipe.balance.cost == "profile":
        return f"Seconds: those of the profile; {exchanged}."
    flops_per_s = recipe.balance.speed.resolved(_device_type(recipe)).flops_per_s
    return (
        f"Seconds: {flops_per_s / 1e12:,.4g} TFLOP/s a rank, {exchanged}: balance.speed, or what training assumes "
        "where that says nothing."
    )
