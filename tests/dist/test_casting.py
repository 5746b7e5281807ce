"""Whole copies that compute in bfloat16: not wrapped in FSDP, and as near to float32 as those that are shared out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cli.tiny_job import losses
from dist.test_resume import stop_after, train_rank
from motet.runtime.casting import computing, set_compute_types
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.sharded_state import ComputeTypes
from parity.tiny import build_model
from ranks import run_ranks

BF16 = ("fsdp.param_dtype=bfloat16", "model.encoders.audio.config.dropout=0.0")
WHOLE = (*BF16, "fsdp.shard_size=1")


def run(job, run_dir, *overrides):
    return run_ranks(train_rank, 2, str(job), [f"run.dir={run_dir}", *overrides], "auto")


def forms(rank: int, num_ranks: int) -> tuple[bool, set[torch.dtype], set[torch.dtype], bool]:
    """Whether anything is wrapped, types of parameters in and after a block, and whether they are the same again."""
    mesh, model = build_mesh(torch.device("cpu"), shard_size=1), build_model(torch.float32)
    shard(model, mesh, FSDPConfig(param_dtype="bfloat16", shard_size=1))
    is_wrapped = any(isinstance(module, FSDPModule) for module in model.modules())
    before = dict(model.named_parameters())
    with computing(model):
        inside = {parameter.dtype for parameter in model.parameters()}
    after = dict(model.named_parameters())
    is_same = before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    return is_wrapped, inside, {type(parameter) is DTensor for parameter in after.values()}, is_same


def test_nothing_is_wrapped_and_parameters_are_cast_in_a_step_alone():
    assert run_ranks(forms, 2) == [(False, {torch.bfloat16}, {False}, True)] * 2


def test_whole_numbers_stay_what_they_are():
    backbone = torch.nn.Linear(2, 2)
    backbone.order = torch.nn.Parameter(torch.tensor([257, 0]), requires_grad=False)
    model = SimpleNamespace(encoders={}, backbone=backbone)
    set_compute_types(model, ComputeTypes(torch.bfloat16))
    with computing(model):
        assert backbone.weight.dtype == torch.bfloat16 and backbone.order.tolist() == [257, 0]


@pytest.mark.slow
def test_a_run_is_that_of_shared_parameters_to_rounding(job, tmp_path):
    """Held-out examples and recomputed blocks too; and a resumed run goes on as if it had not stopped."""
    run(job, tmp_path / "shared", *BF16)
    run(job, tmp_path / "whole", *WHOLE, "fsdp.recompute=true", "checkpoint.every_steps=4")
    whole = losses(tmp_path / "whole")
    assert whole == pytest.approx(losses(tmp_path / "shared"), rel=2e-2)
    shared, own = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("shared", "whole"))
    assert own["loss_heldout"] == pytest.approx(shared["loss_heldout"], rel=2e-2)
    stop_after(tmp_path / "whole", 4)
    run(job, tmp_path / "whole", *WHOLE, "fsdp.recompute=true")
    assert losses(tmp_path / "whole") == whole
