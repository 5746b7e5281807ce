"""Recomputation that differs by rank and microbatch: the same collectives, the same gradients, the same losses."""

from __future__ import annotations

import dataclasses
import itertools
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cli.tiny_job import losses, metrics
from dist.test_resume import run, stop_after, train_rank
from motet.cli import main
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.recompute import Recomputation
from motet.train.recompute_measured import RESIDENT_RESOLUTION_BYTES, PeakCorrection
from motet.train.report.metrics import peak_memory_bytes
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
    [
        FSDPConfig(),
        pytest.param(FSDPConfig(reshard_after_forward=False), marks=pytest.mark.slow),
        FSDPConfig(shard_size=1),
    ],
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


def in_words(printed, part="the largest microbatch of"):
    return [line for line in printed.splitlines() if line.startswith("fsdp.recompute") and part in line]


@pytest.mark.slow
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


@pytest.mark.slow
def test_resident_bytes_of_a_small_run_correct_nothing(job, tmp_path):
    """And it is said once, by one rank."""
    said = run(job, 2, tmp_path, *LARGER, "fsdp.recompute=auto")
    assert len(in_words(said[0], "in steps 2 to 5")) == 1 and not in_words(said[1], "in steps")
    assert re.search(r"rank \d took .* was predicted; .* not corrected, as resident bytes do not tell less", said[0])


def run_measured(rank, num_ranks, recipe, overrides, peaks, resolution_bytes):
    """Train with scripted peaks, rank by rank: (what was printed, recomputed blocks of each step on this rank)."""
    # What fills memory before the model is built does not count, so the first measurement is 0.
    measurements = itertools.chain([0], itertools.count(peaks[rank]))
    patched = pytest.MonkeyPatch()
    found = []
    metrics_of = Recomputation.metrics

    def recorded(self, batches):
        found.append(metrics_of(self, batches))
        return found[-1]

    with patched.context() as patch:
        patch.setattr("motet.train.job.peak_memory_bytes", lambda device: next(measurements))
        patch.setattr("motet.train.recompute.RESIDENT_RESOLUTION_BYTES", resolution_bytes)
        patch.setattr(Recomputation, "metrics", recorded)
        return train_rank(rank, num_ranks, recipe, overrides, "auto"), found


def measured_run(job, folder, peaks, *overrides, resolution_bytes=0):
    """On 2 ranks: what rank 0 printed, and by rank, int [num_steps], the blocks recomputed in a step's microbatch."""
    auto = ("fsdp.recompute=auto", "cluster.memory_gbytes=0.0017")
    overrides = [f"run.dir={folder}", "data.heldout=[]", *LARGER, *auto, *overrides]
    of_ranks = run_ranks(run_measured, 2, str(job), overrides, peaks, resolution_bytes)
    return of_ranks[0][0], [np.array([sum(map(sum, step.values())) for step in found]) for _, found in of_ranks]


@pytest.mark.slow
def test_measured_bytes_correct_each_rank_alone(job, tmp_path):
    """A rank that takes more than predicted recomputes more, the other less; losses stay, to the last bit."""
    run(job, 2, tmp_path / "none", *LARGER)
    peaks = (1_000_000, 2_200_000)
    _, uncorrected = measured_run(job, tmp_path / "predicted", peaks, resolution_bytes=10**12)
    said, (less, more) = measured_run(job, tmp_path / "measured", peaks)
    assert losses(tmp_path / "measured") == losses(tmp_path / "predicted") == losses(tmp_path / "none")
    # Before the second step is done, nothing is known.
    assert (more[:2] == uncorrected[1][:2]).all() and (more[2:] > uncorrected[1][2:]).all()
    # What was prefetched before that fits all the same, and stays.
    assert (less <= uncorrected[0]).all() and uncorrected[0][5:].all() and not less[5:].any()
    (line,) = in_words(said, "in steps 2 to 5")
    assert re.search(r"rank 1 took 2.2 MB where \S+ MB was predicted, so it fits microbatches to a prediction of", line)


@pytest.mark.slow
def test_a_resumed_run_measures_anew(job, tmp_path):
    peaks = (1_000_000, 2_200_000)
    measured_run(job, tmp_path, peaks, "checkpoint.every_steps=3", "checkpoint.keep=3")
    whole = losses(tmp_path)
    for step in (6, 8):
        (tmp_path / "checkpoints" / f"step-{step:08d}").rename(tmp_path / f"step-{step}")
    said, (_, more) = measured_run(job, tmp_path, peaks)
    assert losses(tmp_path) == whole and len(more) == 5
    assert len(in_words(said, "in steps 5 to 8, rank 1 took")) == 1


def test_a_microbatch_that_cannot_fit_is_warned_of_once(job, tmp_path):
    said, _ = measured_run(job, tmp_path, (1_000_000, 40_000_000))
    (line,) = in_words(said, "lacks")
    assert re.search(r"with every block recomputed, a microbatch of step 3 lacks \S+ MB of memory on a rank", line)
    assert metrics(tmp_path)[-1]["memory"]["lacking_bytes"] > 0 and metrics(tmp_path)[0]["memory"]["lacking_bytes"] == 0


def resident_correction(rank, num_ranks):
    """What the peak of a real process tells of 500 MB that a step keeps."""
    device = torch.device("cpu")
    before_bytes = peak_memory_bytes(device)
    correction = PeakCorrection(
        2e9, 1e8, lambda: peak_memory_bytes(device) - before_bytes, resolution_bytes=RESIDENT_RESOLUTION_BYTES
    )
    for num_bytes in (1, 500_000_000):
        correction.begin_step()
        held = torch.ones(num_bytes, dtype=torch.uint8)
        correction.end_step(predicted_bytes=1.5e8)
        del held
    return correction.largest.measured_bytes, correction.limit_bytes


def test_resident_bytes_correct_what_they_tell():
    ((measured_bytes, limit_bytes),) = run_ranks(resident_correction, 1)
    assert 4.9e8 < measured_bytes < 6e8 and limit_bytes < 2e9


def test_what_does_not_fit_ends_all_ranks_with_one_sentence(job, tmp_path):
    said = run(job, 2, tmp_path, *LARGER, "fsdp.recompute=auto", "cluster.memory_gbytes=0.001")
    assert said[0] == said[1] and "with every block recomputed, the largest microbatch takes" in said[0]
    said = run(job, 2, tmp_path, "fsdp.recompute=auto")
    assert said[0] == said[1] and "must know how much memory a rank may fill" in said[0]
