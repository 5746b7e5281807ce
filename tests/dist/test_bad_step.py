"""A step that is not finite: named with its module and its examples, stopped at or skipped, and without any trace."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

import motet.data.decode as decode
from cli.tiny_job import losses, metrics
from motet.core.errors import UserError
from motet.core.example import Media
from motet.models.backbone import Backbone
from motet.runtime.step import TrainStep
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

BAD = "train-5"
"""An example with an image, on line 6."""


def spoil_image(value):
    """The decoded image of one example becomes `value`."""
    load = decode.load_media

    def spoilt(ref, transform):
        media = load(ref, transform)
        if isinstance(media, Media) and ref.name.endswith(f"{BAD}.png"):
            media = Media(np.full_like(media.values, value), media.size)
        return media

    decode.load_media = spoilt


def train_rank(rank, num_ranks, recipe, overrides, prepare, arguments):
    """What was printed, or said at the end."""
    if prepare is not None:
        prepare(*arguments)
    with redirect_stdout(StringIO()) as printed:
        try:
            train(load_recipe(Path(recipe), overrides))
        except UserError as error:
            return str(error)
    return printed.getvalue()


def run(recipe, num_ranks, run_dir, *overrides, prepare=None, arguments=()):
    overrides = [f"run.dir={run_dir}", "data.heldout=[]", *overrides]
    return run_ranks(train_rank, num_ranks, str(recipe), overrides, prepare, arguments)


def bad_steps(run_dir):
    return [json.loads(line) for line in (run_dir / "bad_steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "microbatches"), [("index", 2), ("exchange", 1)])
def test_a_spoilt_image_is_named_with_the_first_module_that_read_it(job, tmp_path, mode, microbatches):
    options = (f"balance.mode={mode}", f"run.microbatches={microbatches}", "balance.method=per_phase")
    said = run(job, 2, tmp_path, *options, prepare=spoil_image, arguments=(float("nan"),))
    assert said[0] == said[1]
    assert "is not finite (loss nan, gradient norm nan)" in said[0]
    assert "first in the output of image.encoder." in said[0]
    assert f"of {job.parent / 'train.jsonl'}, line 6. Training stops" in said[0]
    (line,) = bad_steps(tmp_path)
    assert line["loss"] is None
    assert line["examples_of_cause"] == [f"{job.parent / 'train.jsonl'}, line 6"]
    assert sum(len(names) for names in line["examples"]) == 6
    # Nothing is lost: what came before is saved, and the step itself has left no mark.
    assert len(losses(tmp_path)) == line["step"] - 1
    assert f"step {line['step'] - 1} is saved" in said[0]


class Recorder:
    """Weights, moments and counters of a rank before and after each step."""

    seen: list = []

    @classmethod
    def install(cls, poison, value):
        prepare, arguments = poison
        prepare(*arguments, value)
        run_step = TrainStep.run

        def recorded(self, batches, step=0):
            before = cls.state(self)
            result = run_step(self, batches, step)
            cls.seen.append((result.is_finite, all(map(torch.equal, before, cls.state(self)))))
            return result

        TrainStep.run = recorded

    @staticmethod
    def state(step):
        parts = [parameter.to_local() for parameter in step.parameters]
        for slots in step.optimizer.state.values():
            parts += [getattr(value, "to_local", lambda value=value: value)() for value in slots.values()]
        parts += [torch.zeros(())] * (4 * len(step.parameters) - len(parts))
        return [part.clone() for part in parts]


def record_rank(rank, num_ranks, recipe, overrides):
    Recorder.seen = []
    Recorder.install((spoil_image, ()), float("inf"))
    train(load_recipe(Path(recipe), overrides))
    return Recorder.seen


def test_a_skipped_step_changes_nothing_on_any_rank_and_is_counted(job, tmp_path):
    overrides = [f"run.dir={tmp_path}", "data.heldout=[]", 'run.on_bad_step="skip"', "run.steps=12"]
    seen = run_ranks(record_rank, 2, str(job), overrides)
    steps = metrics(tmp_path)
    assert len(steps) == 12
    bad = [step["bad_step"] is not None for step in steps]
    assert 1 <= sum(bad) <= 3, "an epoch is a little less than seven steps"
    for rank in seen:
        assert [not is_finite for is_finite, _ in rank] == bad
        assert [unchanged for _, unchanged in rank[1:]] == bad[1:]
    assert [step["loss"] is None for step in steps] == bad
    assert [step["position"] for step in steps] == [6 * (number + 1) for number in range(12)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bad_steps"] == sum(bad) == len(bad_steps(tmp_path))
    assert f"{sum(bad)}" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_resumed_after_a_skipped_step_is_the_run_that_was_not_interrupted(job, tmp_path):
    skip = ('run.on_bad_step="skip"', "run.steps=12", "checkpoint.every_steps=8", "optimizer.clip_norm=inf")
    run(job, 2, tmp_path, *skip, prepare=spoil_image, arguments=(float("inf"),))
    whole = metrics(tmp_path)
    assert any(step["bad_step"] for step in whole[:8])
    (tmp_path / "checkpoints" / "step-00000012").rename(tmp_path / "later")
    said = run(job, 2, tmp_path, *skip, prepare=spoil_image, arguments=(float("inf"),))
    assert "Resuming after step 8" in said[0]
    assert [step["loss"] for step in metrics(tmp_path)] == [step["loss"] for step in whole]
    assert len(bad_steps(tmp_path)) == sum(step["bad_step"] is not None for step in whole)


class Overflow(torch.autograd.Function):
    """x -> x, with a gradient that overflows in the rows of the longest sequence."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor(3e38) * 3e38


def overflow_in_backward():
    hidden = Backbone.hidden_states

    def overflowing(self, *arguments):
        return Overflow.apply(hidden(self, *arguments))

    Backbone.hidden_states = overflowing


def test_a_gradient_that_overflows_is_told_from_an_output(job, tmp_path):
    said = run(job, 2, tmp_path, prepare=overflow_in_backward)
    assert "(loss 3." in said[0]
    assert "gradient of the output of backbone" in said[0]
    assert "(all outputs are finite; the first parameter with such a gradient is backbone." in said[0]
    assert "no step has been trained." in said[0]


def spoil_all():
    def spoilt(self, hidden, tokens):
        return hidden.sum() * float("nan")

    Backbone.loss = spoilt


@pytest.mark.slow
def test_skipping_ends_where_no_step_is_finite(job, tmp_path):
    said = run(job, 2, tmp_path, 'run.on_bad_step="skip"', "run.steps=40", prepare=spoil_all)
    assert "It is the 10th in a row" in said[0]
    assert len(metrics(tmp_path)) == 9
    assert "first in the output of backbone" in said[0]


def spoil_a_weight():
    run_step = TrainStep.run

    def spoilt(self, batches, step=0):
        if step == 2 and self.mesh.rank == 1:
            with torch.no_grad():
                self.parameters[4].to_local().view(-1)[:1] = np.nan
        return run_step(self, batches, step)

    TrainStep.run = spoilt


def test_a_weight_that_is_not_finite_is_named_instead_of_examples(job, tmp_path):
    said = run(job, 2, tmp_path, prepare=spoil_a_weight)
    assert said[0] == said[1]
    assert "the weight " in said[0]
    assert "is not finite before the step" in said[0]
    assert not list((tmp_path / "checkpoints").iterdir()), "weights that are broken are not saved"
