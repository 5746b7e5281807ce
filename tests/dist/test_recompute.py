"""Recomputation that differs by rank and microbatch: the same collectives, and the same gradients to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from parity.test_gradients import Case, local, rank_batch
from parity.tiny import build_model, draw_examples
from ranks import run_ranks

ALL = {"image": 2, "audio": 2, "backbone": 2}
WAYS = {
    # For each rank, what it recomputes in the first and in the second microbatch.
    "none": (({}, {}), ({}, {})),
    "all": ((ALL, ALL), (ALL, ALL)),
    "one rank": (({}, {}), (ALL, ALL)),
    "in turn": ((ALL, {}), ({}, ALL)),
    "some blocks": (({"image": 1}, {"backbone": 2}), ({"audio": 2, "backbone": 1}, {})),
}


class Collectives(TorchDispatchMode):
    """The collectives that run inside, in order, each with the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.ran.append((str(func), [tuple(tensor.shape) for tensor in tensors]))
        return func(*args, **(kwargs or {}))


def steps(rank, num_ranks, fsdp):
    """Of each way: the collectives of a step, blocks that ran again, and gradients."""
    mesh = build_mesh(torch.device("cpu"), shard_size=fsdp.shard_size)
    model = build_model(torch.float64)
    shard(model, mesh, fsdp)
    examples = draw_examples(13)
    case = Case(fsdp=fsdp, phases="off")
    batches = [rank_batch(model, part, mesh, case).to("cpu", dtype=torch.float64) for part in (examples, examples[:3])]
    blocks = [block for module in (*model.encoders.values(), model.backbone) for block in module.blocks]
    num_runs = []
    for block in blocks:
        block.inner.register_forward_pre_hook(lambda *_: num_runs.append(1))
    found = {}
    for way, of_ranks in WAYS.items():
        parts = [dataclasses.replace(batch, recompute=recompute) for batch, recompute in zip(batches, of_ranks[rank])]
        num_runs.clear()
        with Collectives() as collectives:
            TrainStep(model, mesh).run(parts)
        gradients = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        found[way] = collectives.ran, len(num_runs), gradients
    return found


@pytest.mark.parametrize(
    "fsdp",
    [FSDPConfig(), FSDPConfig(reshard_after_forward=False), FSDPConfig(shard_size=1)],
    ids=["gathered again", "kept", "replicated"],
)
def test_ranks_may_recompute_what_they_need(fsdp):
    """FSDP gathers a block's parameters before its backward pass, and a recomputed block runs again inside of it."""
    for rank, found in enumerate(run_ranks(steps, 2, fsdp)):
        collectives, num_runs, gradients = found["none"]
        assert collectives
        for way, (others, others_runs, other_gradients) in found.items():
            assert others == collectives, (rank, way)
            again = any(WAYS[way][rank])
            assert (others_runs > num_runs) == again, (rank, way)
            for one, other in zip(gradients, other_gradients, strict=True):
                assert (one is None and other is None) or torch.equal(one, other), (rank, way)
