"""Where a simulated Plan gets its model and its workload: plan files, recipes, HF models, manifests, tables of lengths.

Core and simulate know none of these but plan files. Torch, which takes seconds to import, and readers of data are
imported where they are needed: a plan file that names no other file is simulated without them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.plan_file import read_plan
from motet.core.sampler import read_sampler
from motet.core.spec import ModelSpec
from motet.core.text_files import parse_toml, read_text
from motet.core.workload import Workload
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.schedule import check_fills, check_fit

if TYPE_CHECKING:
    from motet.data.examples import Examples
    from motet.data.order import GlobalOrder, ListedOrder, MixedOrder
    from motet.train.recipe.recipe import Recipe


def read_plan_and_workload(
    plan_file: Path, workload_file: Path | None, overrides: Sequence[str] = ()
) -> tuple[Plan, Workload, Recipe | None]:
    """A plan file, the lengths for which it is simulated, and the recipe that would train under it.

    That is the one that has the lengths, else the one that the plan file names as its model; None: there is none.

    workload_file: a manifest, a CSV of lengths (both as in `motet analyze`), a TOML of distributions
                   (`core/sampler.py`), or a recipe; by default the recipe that the plan file names as its model.
    overrides:     of the recipe that has the lengths, as in `--set`; also where the plan file names it as its model.
    Raises UserError for what is wrong with either.
    """
    recipes: list[tuple[Path, Recipe | None]] = []

    def overrides_of(recipe: Path) -> Sequence[str]:
        return overrides if workload_file is None or recipe.resolve() == workload_file.resolve() else ()

    plan = plan_at(plan_file, recipes, overrides_of)
    source = workload_file or next((path for path, _ in recipes), None)
    if source is None:
        raise UserError(
            f"{plan_file} names no recipe, so --workload must say which lengths to simulate: a manifest, a CSV of "
            "lengths, a TOML of distributions, or a recipe."
        )
    workload = workload_at(source, overrides, recipes)
    return plan, workload, next((recipe for _, recipe in reversed(recipes) if recipe is not None), None)


def plan_at(
    plan_file: Path,
    recipes: list[tuple[Path, Recipe | None]] | None = None,
    overrides_of: Callable[[Path], Sequence[str]] = lambda recipe: (),
) -> Plan:
    """A plan file, whose Plan fits its own model and cluster, and has fills that can run, if any. Raises UserError,
    which names the file.

    recipes:      gets the recipe that the file names as its model, if it does: None if it is of shapes alone.
    overrides_of: such a recipe -> what is set in it, as by `--set`.
    """

    def model_at(path: Path) -> ModelSpec:
        if path.suffix != ".toml":
            from motet.models.spec import spec_of_directory

            return spec_of_directory(path)
        read = read_job_recipe(path, overrides_of(path))
        if recipes is not None:
            recipes.append((path, read.recipe))
        return read.model

    plan = read_plan(plan_file, model_at=model_at, cluster_named=cluster)
    where = str(plan_file)
    try:
        check_fit(plan)
        if plan.fills:
            where = f"{plan_file}: 'fills'"
            check_fills(plan)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return plan


def workload_at(
    path: Path, overrides: Sequence[str] = (), recipes: list[tuple[Path, Recipe | None]] | None = None
) -> Workload:
    """The lengths in a manifest, a CSV, a TOML of distributions, or a recipe, which also ends in .toml.

    overrides: of a recipe, as in `--set`. recipes: as of `plan_at`, of this one.
    Raises UserError for what is wrong with the file, and for overrides of one that is no recipe.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the manifest in it, or another file of lengths.")
    tables = _tables(path) if path.suffix == ".toml" else None
    if overrides and (tables is None or "task" in tables):
        raise UserError(f"--set is for a recipe; {path}, which has the lengths, is none.")
    if tables is None:
        from motet.analyze.lengths import read_lengths

        return read_lengths(path).workload()
    if "task" in tables:
        return replace(read_sampler(path).workload(), source=str(path))
    if not {"data", "workload"} & tables.keys():
        raise UserError(f"{path} is to say which lengths there are; it has neither [data], [workload] nor [[task]].")
    read = read_job_recipe(path, overrides)
    if recipes is not None:
        recipes.append((path, read.recipe))
    if read.recipe is not None:
        return workload_of(read.recipe, str(path))
    assert read.workload is not None, "a recipe without data that has [workload]"
    return read.workload


def workload_of(recipe: Recipe, source: str) -> Workload:
    """The lengths of a recipe's training data, as its model takes them.

    source: what messages call the workload. Raises UserError.
    """
    dataset, _ = training_data(recipe)
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 1)
    return Workload(source, lengths, weight=example_weights(recipe, dataset))


def example_weights(recipe: Recipe, dataset: Examples) -> Float64Array | None:
    """How often training takes each example, float64 [num_examples], in any unit; None if all equally often."""
    if not recipe.data.weights:
        return None
    counts = dataset.num_by_manifest
    return np.repeat(np.array(recipe.data.weights) / np.maximum(counts, 1), counts)


def training_order(recipe: Recipe, workload: Workload, *, is_own: bool) -> GlobalOrder | MixedOrder | ListedOrder:
    """The order in which training takes the examples of a workload, which may be in groups.

    is_own: whether they are those of the recipe's own data, of which alone the manifests are known.
    """
    from motet.data.order import GlobalOrder, ListedOrder
    from motet.train.input.own_splits import order_of

    examples, data = workload.examples, recipe.data
    if examples.group is not None:
        return ListedOrder(np.arange(examples.num_examples), examples.group)
    if is_own and data.weights:
        return order_of(recipe, training_data(recipe)[0])
    return GlobalOrder(examples.num_examples, data.seed, data.shuffle)


def training_data(recipe: Recipe) -> tuple[Examples, ModelSpec]:
    """The training data of a recipe, indexed or drawn, and its model.

    Raises UserError, also for data split over ranks.
    """
    if recipe.data.is_split:
        raise UserError(
            f"{recipe.data.train[0]} in data.train is another file for each rank, and here there are no ranks: name "
            f"splits by --set, as in --set 'data.train={list(recipe.data.split(0))}'."
        )
    import torch

    from motet.models.build import build_mllm
    from motet.models.spec import model_spec
    from motet.train.input.datasets import open_dataset

    vocabulary = recipe.vocabulary()
    with torch.device("meta"):
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size)
    return open_dataset(recipe, recipe.data.train, vocabulary, model, _warn), model_spec(model)


def _tables(path: Path) -> dict[str, Any]:
    return parse_toml(read_text(path, "the lengths in"), str(path))


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)
