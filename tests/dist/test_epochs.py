"""`run.epochs`: a run that takes each example so often is one of so many steps."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from cli.on_ranks import motet_on_ranks
from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_resume import run
from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.data.groups import GroupedOrder
from motet.data.order import GlobalOrder, MixedOrder
from motet.data.splits import SplitOrder
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recipe.run_config import RunConfig


def test_epochs_are_steps_of_the_examples_that_can_be_used(tmp_path):
    by_steps = write_tiny_job(tmp_path / "data")
    by_epochs = by_steps.with_name("epochs.toml")
    by_epochs.write_text(by_steps.read_text().replace("steps = 8", "epochs = 0.5"))
    (said, silent) = run(by_epochs, 2, tmp_path / "a", "data.max_sequence_length=24", "data.too_long=drop")
    lines = metrics(tmp_path / "a")
    num_steps = len(lines)
    # Half of the examples, and of the last step what it lacks.
    num_examples = int(said.split("Each of the ")[1].split(" examples is taken 0.5 times, in ")[0])
    assert num_examples < len((by_steps.parent / "train.jsonl").read_text().splitlines())
    assert num_steps == math.ceil(num_examples / 2 / 6) and lines[-1]["position"] == 6 * num_steps
    assert "is taken" not in silent
    assert said.count('= 24 are left out; data.too_long = "truncate" would cut them there, at an item that fits.') == 1
    # What is written is the recipe of these steps, which a run goes on with, and one of steps is the same run.
    written = load_recipe(tmp_path / "a" / "recipe.toml").run
    assert (written.steps, written.epochs) == (num_steps, None)
    run(by_steps, 2, tmp_path / "b", "data.max_sequence_length=24", "data.too_long=drop", f"run.steps={num_steps}")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    # With other batches, the steps of an epoch are others, and those so far were of these.
    words = ["train", by_epochs, "--set", f"run.dir={tmp_path / 'a'}", "--set", "data.max_sequence_length=24"]
    ended = motet_on_ranks(1, *words, "--set", "run.batch_size=3")
    assert ended.returncode == 2
    assert f"The run is behind {6 * num_steps} examples after " in ended.stderr
    assert "so run.batch_size was not 3 as now, by which run.epochs = 0.5 is counted in steps" in ended.stderr


@pytest.mark.parametrize(
    ("epochs", "num_examples", "batch_size", "steps"),
    [(1, 12, 4, 3), (1, 13, 4, 4), (2, 13, 4, 7), (0.1, 30, 3, 1), (0.7, 10, 1, 7), (1e-9, 10, 4, 1)],
)
def test_a_last_step_is_whole(epochs, num_examples, batch_size, steps):
    run = RunConfig(dir="run", epochs=epochs, batch_size=batch_size).over(GlobalOrder(num_examples))
    assert (run.steps, run.num_steps, run.epochs) == (steps, steps, None)


TOTALS = {BACKBONE: np.random.default_rng(1).integers(1, 40, 50)}
ORDERS = [
    GlobalOrder(12, seed=1),
    SplitOrder((5, 3), seed=1),
    MixedOrder((2, 9), (1, 3), seed=1),
    MixedOrder((7, 5, 4), (3, 5, 1), seed=2),
    GroupedOrder(TOTALS, {BACKBONE: 64}, seed=1),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_each_example_is_taken_so_often_and_no_step_earlier(order, epochs):
    """One example, or group, less is too few, of at least one example."""
    count = order.taken_in(Fraction(epochs))
    taken = [order.step(0, number) for number in (count, count - 1)]
    often = [Counter(Counter(step.ids.tolist()).values()) for step in taken]
    num_examples = order.num_examples if isinstance(order, GroupedOrder | GlobalOrder) else None
    num_examples = num_examples or sum(order.sizes if isinstance(order, SplitOrder) else order.num_examples)
    assert min(often[0]) == epochs and sum(often[0].values()) == num_examples
    assert min(often[1]) < epochs or sum(often[1].values()) < num_examples
    assert isinstance(order, MixedOrder) or max(often[0]) == epochs
    assert order.taken_before(len(taken[0].ids)) == count


def test_a_part_of_an_epoch_is_that_share_of_its_examples():
    groups = GroupedOrder(TOTALS, {BACKBONE: 64}, seed=1)
    count = groups.taken_in(Fraction("1.5"))
    assert len(groups.step(0, count).ids) >= 75 > len(groups.step(0, count - 1).ids)
    mixed = MixedOrder((10, 4), (1, 1), seed=1)
    assert mixed.taken_in(Fraction("0.5")) == 2 * 5 - 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [["data.group={ image = 200, audio = 200, backbone = 100 }"], ["data.mixture=[1, 3]"]])
def test_a_run_of_groups_or_of_a_mixture_goes_on_in_its_epochs(tmp_path, more):
    recipe = write_tiny_job(tmp_path / "data", num_train=20)
    train = recipe.parent / "train.jsonl"
    lines = train.read_text().splitlines(keepends=True)
    (recipe.parent / "few.jsonl").write_text("".join(lines[:4]))
    text = recipe.read_text().replace("steps = 8", "epochs = 1.5").replace("batch_size = 6", "batch_size = 2")
    recipe.write_text(text)
    if "mixture" in more[0]:
        more = [*more, 'data.train=["few.jsonl", "train.jsonl"]']
    whole, _ = run(recipe, 2, tmp_path / "a", *more, "checkpoint.every_steps=3")
    assert "is taken 1.5 times, in" in whole or "is taken at least 1.5 times, in" in whole
    again, _ = run(recipe, 2, tmp_path / "a", *more)
    assert "which is the last step" in again


def test_epochs_that_cannot_be_run():
    with pytest.raises(UserError, match=r"run.epochs = 2 are 4 steps, and profile_steps has 5, and the steps are 1 to"):
        RunConfig(dir="run", epochs=2, batch_size=4, profile_steps=(4, 5)).over(GlobalOrder(8))
    with pytest.raises(UserError, match=r"run.epochs = 1e\+09 are .* steps; a run may have "):
        RunConfig(dir="run", epochs=1e9, batch_size=1).over(GlobalOrder(10**6))
