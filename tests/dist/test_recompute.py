"""Recomputation that differs by rank and microbatch: the same collectives, the same gradients, the same losses."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_resume import run, stop_after
from motet.cli import main
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


LARGER = (
    "model.encoders.image.config.depth=3",
    "model.encoders.audio.config.encoder_layers=3",
    "model.backbone.config.num_hidden_layers=4",
    'cluster={ device = "cpu", ranks_per_node = 2, memory_gbytes = 0.0019 }',
    "balance.phases=off",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


def in_words(printed):
    return [line for line in printed.splitlines() if line.startswith("fsdp.recompute")]


def test_a_run_recomputes_what_its_microbatches_need(job, tmp_path, monkeypatch, capsys):
    """The losses are those without recomputation, a resumed run decides alike, and so does a simulation."""
    auto = (*LARGER, "fsdp.recompute=auto", "checkpoint.every_steps=4")
    run(job, 2, tmp_path / "none", *LARGER)
    first = run(job, 2, tmp_path / "auto", *auto)
    assert losses(tmp_path / "auto") == losses(tmp_path / "none")
    before = [step["recompute"] for step in metrics(tmp_path / "auto")]
    # One rank may need what the other does not, and one step what the next does not.
    assert any(0 < of["mean"] < of["max"] for step in before for of in step.values())
    assert any(not any(of["max"] for of in step.values()) for step in before)
    assert all(step["recompute"]["image"] == {"max": 0, "mean": 0.0} for step in metrics(tmp_path / "none"))
    stop_after(tmp_path / "auto", 4)
    again = run(job, 2, tmp_path / "auto", *auto)
    assert [step["recompute"] for step in metrics(tmp_path / "auto")] == before
    words = in_words(first[0])
    assert len(words) == 1 and words == in_words(again[0]) and not in_words(first[1])
    overrides = [word for each in auto for word in ("--set", each)]
    monkeypatch.setattr("sys.argv", ["motet", "simulate", str(job), *overrides])
    with suppress(SystemExit):
        main()
    assert in_words(capsys.readouterr().err) == words
    assert re.search(
        r"with \d of 3 of image.* recomputed, the largest microbatch of all 8 steps takes 1.\d+ MB", words[0]
    )


def test_what_does_not_fit_ends_all_ranks_with_one_sentence(job, tmp_path):
    said = run(job, 2, tmp_path, *LARGER, "fsdp.recompute=auto", "cluster.memory_gbytes=0.001")
    assert said[0] == said[1] and "with every block recomputed, the largest microbatch takes" in said[0]
    said = run(job, 2, tmp_path, "fsdp.recompute=auto")
    assert said[0] == said[1] and "must know how much memory a rank may fill" in said[0]
