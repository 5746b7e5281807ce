"""`run.epochs`: a run that takes each example so often is one of so many steps."""

import math

import pytest

from cli.on_ranks import motet_on_ranks
from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_resume import run
from motet.core.errors import UserError
from motet.train.recipe.recipe import RunConfig, load_recipe


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
    run = RunConfig(dir="run", epochs=epochs, batch_size=batch_size).over(num_examples)
    assert (run.steps, run.num_steps, run.epochs) == (steps, steps, None)


def test_epochs_that_cannot_be_run():
    with pytest.raises(UserError, match=r"run.epochs = 2 are 4 steps, and profile_steps has 5, and the steps are 1 to"):
        RunConfig(dir="run", epochs=2, batch_size=4, profile_steps=(4, 5)).over(8)
    with pytest.raises(UserError, match=r"run.epochs = 1e\+09 are .* steps; a run may have "):
        RunConfig(dir="run", epochs=1e9, batch_size=1).over(10**6)
