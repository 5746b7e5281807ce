"""What a forward pass keeps on each tensor-parallel rank is at most what `cost/memory.py` says, and not much less."""

from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.cost.flops import work_of
from motet.cost.memory import kept_bytes, stage_layers
from motet.runtime.sections import Section, SectionedStage
from motet.runtime.sharded_state import ComputeTypes
from parity.planned import PlannedCase, batches_of, build_hf_model, build_step
from ranks import run_ranks

BF16 = ComputeTypes(torch.bfloat16, torch.float32)
ALL = {"image": 3, "audio": 2, "backbone": 3}
AGAIN = ({"image": 2, "audio": 1, "backbone": 2},)


def predicted(step, model, stage, batch) -> Counter:
    """Bytes by module."""
    total = Counter()
    for placed in stage_layers(model, stage.layers, stage.recomputed):
        if placed.module == BACKBONE:
            lengths = np.diff(batch.sequences.offsets.numpy()).astype(np.int64)
        else:
            lengths = step.model.encoders[placed.module].lengths(batch.media[placed.module][1].numpy())
        num_targets = np.array([int(batch.sequences.targets.sum())]) if placed.layer.targets_only else None
        rows = work_of(placed.layer, lengths, num_targets=num_targets).rows[0]
        total[placed.module] += placed.has_backward * kept_bytes(placed, rows, stage.unit.tp, 2)[placed.recomputed]
    return total


@contextmanager
def counting(step, model, found):
    """In the block, `found` gets of each forward pass of a stage the bytes kept and those predicted, by module.

    Of storages that backward reads, without parameters, each once: with the section that is the first to keep it.
    """
    run, forward, stages = Section.run, SectionedStage.forward, step.place.stages
    storages, sizes, own = {}, Counter(), set()

    def keep(module, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own | storages.keys():
            storages[storage.data_ptr()] = storage  # Held, so that no other tensor gets its place.
            sizes[module] += storage.nbytes()
        return tensor

    def run_section(section, batch, taken, **how):
        name, tensors = section.span.module, [*step.model.parameters(), *step.model.buffers()]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        own.update(tensor.untyped_storage().data_ptr() for tensor in local)
        for leaf in taken.values():
            keep(name, leaf)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: keep(name, tensor), lambda tensor: tensor):
            return run(section, batch, taken, **how)

    def run_stage(stage, batch, inputs, part=-1):
        storages.clear()
        sizes.clear()
        result = forward(stage, batch, inputs, part)
        (planned,) = stages.values()
        found.append((dict(sizes), predicted(step, model, planned, batch)))
        return result

    Section.run, SectionedStage.forward = run_section, run_stage
    try:
        yield
    finally:
        Section.run, SectionedStage.forward = run, forward


def kept(rank, num_ranks, cases):
    found = []
    for case in cases:
        step, passes = build_step(case, torch.float32, BF16), []
        with counting(step, case.plan().model, passes):
            step.run(batches_of(case, step.place, build_hf_model(), 0))
        found.append(passes)
    return found


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_keeps_what_its_stage_is_said_to_keep(tp):
    """Of an encoder and the backbone, also if rows enter again. Audio is left out: its convolutions pad few rows."""
    units = [Unit("all", (ALL,), tp=tp, zero=0, recompute=recompute) for recompute in ((), AGAIN)]
    cases = [PlannedCase((unit,), batch_size=4, parts=parts) for unit in units for parts in ((), ("again",))]
    for of_rank in run_ranks(kept, tp, cases):
        for case, passes in zip(cases, of_rank, strict=True):
            held, said = Counter(), Counter()
            for of_pass, of_model in passes:
                held.update(of_pass)
                said.update(of_model)
            for name in ("image", "backbone"):
                assert 0.87 * said[name] <= held[name] <= 1.03 * said[name], (case, name, held, said)
