"""float16: the loss scale changes no gradient, all skip what overflows on one rank, and a run resumes with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cli.tiny_job import losses, metrics
from dist.test_planned import FEW_CUTS, plan_of, said_under
from dist.test_resume import stop_after
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.loss_scale import LossScale
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from parity.planned import PlannedCase, batches_of, build_step
from parity.test_gradients import Case, local, mesh_of, rank_batch
from parity.tiny import build_model, draw_examples
from ranks import run_ranks

SCALE = 2.0**16
STAGES = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})
PLANNED = {zero: PlannedCase((Unit("all", STAGES, pp=2, dp=2, zero=zero),)) for zero in (1, 3)}


def overflowing(step):
    """The step, in which the gradient of this rank's loss is infinite from now on; returns what ends it."""
    backbone = step.model.backbone
    name = "leave" if isinstance(step, PlannedStep) else "forward"
    run = getattr(backbone, name)

    def spoilt(*args):
        loss_sum, *others = run(*args)
        loss_sum.register_hook(lambda gradient: gradient * torch.inf)
        return loss_sum, *others

    setattr(backbone, name, spoilt)
    return lambda: delattr(backbone, name)


def data_parallel(fsdp, scale):
    """A step of data parallelism, and its batches by number."""
    case, mesh = Case(fsdp=fsdp), mesh_of(fsdp.shard_size)
    model = build_model()
    shard(model, mesh, fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(model, mesh, optimizer, max_grad_norm=0.5, loss_scale=scale)
    contents = [("image", "audio"), ("image",), ("image", "audio")]

    def batches(number):
        batch = rank_batch(model, draw_examples(7, number, contents[number]), mesh, case)
        return [batch.to("cpu", dtype=torch.float64)]

    return step, batches


def planned(case, scale):
    """A step under a Plan with stages, and its batches by number."""
    step, whole = build_step(case), case.model()
    step.loss_scale = scale
    return step, lambda number: batches_of(case, step.place, whole, number)


def trained(build, what, scale, spoils):
    """Norms of three steps, whether a step was skipped, and the weights after the last. spoils: before the second."""
    step, batches = build(what, scale)
    norms, skipped = [], []
    for number in range(3):
        if spoils is not None and number == 1:
            before = [local(p).detach().clone() for p in step.model.parameters()]
            mend = overflowing(step) if spoils else None
            result = step.run(batches(number), number)
            same = all(map(torch.equal, before, [local(p).detach() for p in step.model.parameters()]))
            skipped.append((result.has_overflowed, result.loss_scale, same))
            scale.overflowed()
            if mend is not None:
                mend()
        norms.append(step.run(batches(number), number).grad_norm)
    return norms, skipped, [local(p).detach().clone() for p in step.model.parameters()]


def compare(rank, num_ranks, build, what):
    """Whether all is equal to the last bit with a loss scale, and what became of the step that one rank spoilt."""
    norms, _, weights = trained(build, what, None, None)
    scale = LossScale(SCALE, grow_after=100)
    scaled_norms, skipped, scaled = trained(build, what, scale, rank == num_ranks - 1)
    return scaled_norms == norms, all(map(torch.equal, weights, scaled)), scale.value, skipped


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (data_parallel, FSDPConfig()),
        (data_parallel, FSDPConfig(shard_size=1)),
        pytest.param(planned, PLANNED[1], marks=pytest.mark.slow),
        pytest.param(planned, PLANNED[3], marks=pytest.mark.slow),
    ],
    ids=["sharded", "whole copies", "stages, ZeRO 1", "stages, ZeRO 3"],
)
def test_a_scale_changes_no_bit_and_an_overflow_of_one_rank_is_skipped_by_all(build, what):
    num_ranks = 4 if build is planned else 2
    expected = (True, True, SCALE / 2, [(True, SCALE, True)])
    assert run_ranks(compare, num_ranks, build, what) == [expected] * num_ranks


BASE = ("data.heldout=[]", "model.encoders.audio.config.dropout=0.0", "checkpoint.every_steps=4")
HALF = (*BASE, "fsdp.param_dtype=float16", "fsdp.loss_scale=1048576.0", "fsdp.loss_scale_steps=3")


def check_scales(run_dir):
    """Each step's scale follows from what became of the one before; returns the losses."""
    steps = metrics(run_dir)
    scale, num_finite = 2.0**20, 0
    for step in steps:
        assert step["loss_scale"] == scale and step["bad_step"] is None
        assert step["overflow"] == (step["grad_norm"] is None)
        num_finite = 0 if step["overflow"] else num_finite + 1
        scale = scale / 2 if step["overflow"] else scale * (2 if num_finite == 3 else 1)
        num_finite %= 3
    assert 1 <= sum(step["overflow"] for step in steps) < 8
    assert [step["position"] for step in steps] == [6 * (number + 1) for number in range(8)]
    return losses(run_dir)


@pytest.mark.slow
def test_a_run_in_float16_finds_its_scale_and_resumes_with_it(job, tmp_path):
    overrides = [f"run.dir={tmp_path}", *HALF]
    said = run_ranks(said_under, 2, str(job), overrides, None)[0]
    assert "Step 1: gradients overflow float16 at a loss scale of 1,048,576, so it changes nothing" in said
    assert "steps overflowed float16 and changed nothing" in said
    whole = check_scales(tmp_path)
    stop_after(tmp_path, 4)
    run_ranks(said_under, 2, str(job), overrides, None)
    assert check_scales(tmp_path) == whole


def test_a_plan_with_stages_trains_in_float16(job, tmp_path):
    file = tmp_path / "plan.json"
    write_plan(replace(plan_of(job, FEW_CUTS), precision="fp16"), file)
    deeper = (
        "model.encoders.audio.config.encoder_layers=2",
        "model.encoders.image.config.depth=2",
        "model.backbone.config.num_hidden_layers=3",
    )
    run_ranks(said_under, 2, str(job), [f"run.dir={tmp_path / 'planned'}", *deeper, *HALF], str(file))
    run_ranks(said_under, 1, str(job), [f"run.dir={tmp_path / 'alone'}", *deeper, *BASE], None)
    assert check_scales(tmp_path / "planned")[0] == pytest.approx(losses(tmp_path / "alone")[0], rel=1e-2)
