"""Held-out loss, greedy answers and export under a Plan with stages: as of one process with the same weights."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.tiny_job import write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_planned import DEEPER, FEW_CUTS, LATE_CUT, plan_of, train_under
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.train.job import build_job
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import join_world
from ranks import run_ranks

EVALUATED = (*DEEPER[1:], "evaluate.batch_size=5", "evaluate.max_new_tokens=9")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Eleven held-out examples, in chunks of five, which do not fill a batch of the Plans. One clip is not finite."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_heldout=11)
    spoil_clips(recipe.parent, "heldout-6.wav", 1)
    return recipe


def evaluate(rank, num_ranks, recipe, overrides, plan=None):
    path, chosen, said = Path(recipe), None, []
    read = load_recipe(path, overrides)
    if plan is not None:
        read, chosen = recipe_under_plan(read, path, Path(plan))
    with join_world("cpu") as world, ExitStack() as cleanup:
        job = build_job(read, world, "never", said.append, cleanup, chosen)
        with torch.no_grad():
            for weight in job.model.parameters():
                # As initialised, a model says the same to everything.
                weight.mul_(6 if weight.ndim > 1 else 1)
        job.model.train()
        found = job.evaluator.run(job.model)
        assert job.model.training and job.evaluator.run(job.model, is_stopped=lambda: rank == 0) is None
        return found, [sentence for sentence in said if "evaluation" in sentence]


def decoded(rank, num_ranks, recipe, overrides, plan):
    """The names of the files that this rank decodes in an evaluation."""
    read, chosen = recipe_under_plan(load_recipe(Path(recipe), overrides), Path(recipe), Path(plan))
    with join_world("cpu") as world, ExitStack() as cleanup:
        job, names = build_job(read, world, "never", lambda said: None, cleanup, chosen), []
        submit = job.decoder.submit

        def counted(refs, readers):
            names.extend(ref.name for ref in refs)
            return submit(refs, readers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job.decoder, "submit", counted)
            job.evaluator.run(job.model)
        return names


def test_what_fills_up_a_batch_is_not_decoded_again(job, tmp_path):
    """Four examples, one at a time in batches of six: of a large batch nearly all decoding was of copies."""
    write_plan(plan_of(job, FEW_CUTS), tmp_path / "plan.json")
    overrides = [*DEEPER[1:], f"run.dir={tmp_path}", "evaluate.batch_size=1", "evaluate.max_examples=4"]
    overrides += ["evaluate.max_new_tokens=1"]
    for names in run_ranks(decoded, 2, str(job), overrides, str(tmp_path / "plan.json")):
        # Once for the loss, and once for the answers.
        assert all(names.count(name) <= 2 for name in names), names


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory):
    overrides = [*EVALUATED, f"run.dir={tmp_path_factory.mktemp('alone')}"]
    return run_ranks(evaluate, 1, str(job), overrides)[0]


def beside(job, *units, **options):
    plan = plan_of(job, FEW_CUTS)
    num_ranks = max(unit.ranks.stop for unit in units)
    where = replace(plan.cluster, ranks_per_node=num_ranks)
    return replace(plan, cluster=where, units=units, microbatch_size=1, **options)


WHOLE = {"image": 2, "audio": 2, "backbone": 3}
PLANS = {
    "chain": lambda job: plan_of(job, FEW_CUTS),
    "recomputed": lambda job: plan_of(job, LATE_CUT, schedule="gpipe", recompute=({"image": 1}, {"backbone": 2})),
    "beside each other": lambda job: beside(
        job, Unit("image", ({"image": 2},)), Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=1)
    ),
    "unequal replicas": lambda job: beside(
        job, Unit("image", ({"image": 2},), dp=2), Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=2)
    ),
    "two replicas": lambda job: beside(job, Unit("all", FEW_CUTS, pp=2, dp=2, zero=0)),
    "ZeRO 1": lambda job: beside(job, Unit("all", FEW_CUTS, pp=2, dp=2, zero=1)),
    "shared sequences": lambda job: beside(job, Unit("all", FEW_CUTS, pp=2, cp=2, zero=0)),
    "cut sequences": lambda job: beside(job, Unit("all", FEW_CUTS, pp=2, dp=2, cp=1, zero=0), balance="split"),
    "cut sequences of replicas beside one encoder": lambda job: beside(
        job,
        Unit("image", ({"image": 2},)),
        Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=1, dp=2),
        balance="split",
        order="both",
    ),
    "ZeRO 3": lambda job: beside(job, Unit("all", FEW_CUTS, pp=2, dp=2, zero=3)),
    "shared products": lambda job: beside(
        job, Unit("all", (WHOLE,), tp=2, dp=2, zero=3), schedule="data_parallel", balance="per_phase"
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "chain" else pytest.mark.slow) for name in PLANS]
)
def test_loss_and_answers_equal_one_process(job, expected, tmp_path, name):
    assert_same(job, expected, tmp_path, PLANS[name](job), EVALUATED)


@pytest.mark.slow
def test_loss_and_answers_of_prompts_that_see_themselves_in_both_directions(job, tmp_path):
    overrides = [*EVALUATED, "model.backbone.prefix=true", 'model.backbone.bidirectional=["image"]']
    expected = run_ranks(evaluate, 1, str(job), [*overrides, f"run.dir={tmp_path}"])[0]
    assert_same(job, expected, tmp_path, PLANS["shared sequences"](job), overrides)


@pytest.mark.slow
def test_loss_and_answers_of_ranks_that_share_experts(job, tmp_path):
    """Where a rank has no example left, it takes part in the experts of others."""
    overrides = [*EVALUATED, "model.backbone.family=mixtral", "model.backbone.config.num_local_experts=4"]
    expected = run_ranks(evaluate, 1, str(job), [*overrides, f"run.dir={tmp_path}"])[0]
    plan = beside(job, Unit("all", (WHOLE,), dp=2, ep=2, zero=3), schedule="data_parallel")
    plan = replace(plan, model=read_job_recipe(job, overrides).model)
    assert_same(job, expected, tmp_path, plan, overrides)


def assert_same(job, expected, tmp_path, plan, overrides):
    file, num_ranks = tmp_path / "plan.json", max(unit.ranks.stop for unit in plan.units)
    write_plan(plan, file)
    (alone, alone_said) = expected
    for found, said in run_ranks(evaluate, num_ranks, str(job), [*overrides, f"run.dir={tmp_path}"], str(file)):
        assert found.loss == pytest.approx(alone.loss, rel=1e-10)
        assert (found.samples, found.exact_match, found.num_examples) == (
            alone.samples,
            alone.exact_match,
            alone.num_examples,
        )
        assert said == alone_said
    assert len(alone.samples) == 10 and len({answer.answer for answer in alone.samples}) > 3
    assert len(alone_said) == 1 and "heldout-6.wav" in alone_said[0]


@pytest.mark.slow
def test_the_exported_directory_does_not_depend_on_the_plan(job, tmp_path):
    """To the bit, from one checkpoint: of one process, of a chain, and of a chain whose weights are shared out."""
    whole = tmp_path / "whole"
    overrides = [*DEEPER, "run.steps=1", "checkpoint.every_steps=1"]
    run_ranks(train_under, 1, str(job), [*overrides, f"run.dir={whole}"], None)
    exported = {}
    shared = beside(job, Unit("all", LATE_CUT, pp=2, dp=2, zero=3))
    for name, plan in (("alone", None), ("chain", plan_of(job, FEW_CUTS)), ("shared", shared)):
        run_dir, file = tmp_path / name, tmp_path / f"{name}.json"
        shutil.copytree(whole, run_dir)
        if plan is not None:
            write_plan(plan, file)
        more = [*overrides, f"run.dir={run_dir}", "export.at_end=true"]
        num_ranks = 1 if plan is None else plan.cluster.ranks_per_node
        run_ranks(train_under, num_ranks, str(job), more, plan and str(file))
        files = [path for path in (run_dir / "export").rglob("*") if path.is_file()]
        exported[name] = {str(path.relative_to(run_dir / "export")): path.read_bytes() for path in files}
    assert exported["chain"] == exported["alone"] == exported["shared"]
    assert {"backbone/model.safetensors", "projectors/image.safetensors"} <= exported["alone"].keys()
