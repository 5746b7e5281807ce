"""The balanced step on one CUDA device over NCCL against the one-process reference on the CPU."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

from motet.runtime.fsdp import FSDPConfig, shard, wrap
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.optimizer import OptimizerConfig, build_optimizer
from parity.test_gradients import Case, rank_batch
from parity.tiny import build_model, draw_examples, reference_step


@pytest.fixture
def mesh():
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.set_device(0)
        # Collectives of CPU tensors (lengths, items) go over gloo, those of the step over NCCL.
        backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        yield build_mesh(torch.device("cuda", 0))
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["index", "exchange"])
@pytest.mark.parametrize("prepare", [shard, wrap], ids=["whole", "FSDP2"])
@pytest.mark.parametrize(
    ("fsdp", "tolerance"),
    [
        pytest.param(FSDPConfig(), 1e-10, id="float64"),
        pytest.param(FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32"), 2e-2, id="bf16"),
    ],
)
def test_step_equals_the_reference(mesh, fsdp, tolerance, prepare, mode):
    """One rank alone holds whole copies; FSDP2, as ranks that share one have it, is put around them by hand."""
    dtype = torch.float64 if fsdp.param_dtype is None else torch.float32
    examples = draw_examples(13)
    expected = build_model(torch.float64)
    loss = reference_step(expected, examples)
    model = build_model(dtype).to(mesh.device)
    prepare(model, mesh, fsdp)
    batch = rank_batch(model, examples, mesh, Case(mode=mode)).pin_memory().to(mesh.device, dtype=dtype)
    result = TrainStep(model, mesh).run([batch])
    assert result.loss == pytest.approx(loss, rel=tolerance)
    difference = total = 0.0
    for found, reference in zip(model.parameters(), expected.parameters(), strict=True):
        if reference.grad is not None:
            local = getattr(found.grad, "to_local", found.grad.detach)().double().cpu()
            difference += float((local - reference.grad).square().sum())
            total += float(reference.grad.square().sum())
    assert (difference / total) ** 0.5 < tolerance
    assert all(span.duration_s >= 0 for span in result.timeline)


def test_a_step_that_is_not_finite_changes_nothing(mesh):
    """The fused optimizer reads the flag on the device."""
    model = build_model(torch.float32).to(mesh.device)
    shard(model, mesh, FSDPConfig())
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    step = TrainStep(model, mesh, optimizer, max_grad_norm=1.0)
    batch = rank_batch(model, draw_examples(13), mesh, Case()).to(mesh.device, dtype=torch.float32)
    assert step.run([batch]).is_finite
    before = state(step)
    batch.media["image"][0][0] = float("nan")
    assert not step.run([batch]).is_finite
    assert all(map(torch.equal, before, state(step)))
    batch.media["image"][0][0] = 0.0
    assert step.run([batch]).is_finite
    assert not all(map(torch.equal, before, state(step)))


def state(step):
    """Weights, moments and counters."""
    parts = [*step.parameters, *(part for slots in step.optimizer.state.values() for part in slots.values())]
    return [getattr(part.detach(), "to_local", part.detach)().clone() for part in parts]
