"""The rows of encoders that a rank keeps until backward are those of `cost/memory.py` and of all who ask it."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.cost.memory import taken_bytes
from motet.dispatch.edge_messages import assignment_of
from motet.models.spec import model_spec
from motet.planner.item_memory import RankMemory
from motet.runtime.fsdp import shard
from motet.runtime.passes import StagePasses
from motet.runtime.planned_step import _RunningPlan
from motet.runtime.sharded_state import ComputeTypes
from motet.runtime.step import TrainStep
from motet.schedule import high_water, planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from parity.cut_steps import Cut, assembled, decided, mesh_of, model_of
from parity.planned import PlannedCase, batches_of, build_hf_model, build_step
from parity.test_gradients import Case
from ranks import run_ranks

BF16 = ComputeTypes(torch.bfloat16, torch.float32)
ENCODERS, ALL = {"image": 3, "audio": 2}, {"image": 3, "audio": 2, "backbone": 3}
CASES = {
    "one stage": PlannedCase((Unit("all", (ALL,), zero=0),)),
    "a chain": PlannedCase((Unit("all", (ENCODERS, {"backbone": 1}, {"backbone": 2}), pp=3, zero=0),)),
    "frozen": PlannedCase((Unit("all", (ENCODERS, {"backbone": 3}), pp=2, zero=0),), frozen=("image", "audio")),
    "all recomputed": PlannedCase((Unit("all", (ALL,), zero=0, recompute=(ALL,)),), parts=("again",)),
    "inner layers in two stages": PlannedCase(
        (Unit("all", ({**ENCODERS, "backbone": 2}, {"backbone": 1}), pp=2, zero=0),), parts=("stacked",)
    ),
    "shared sequences": PlannedCase((Unit("all", (ALL,), cp=2, zero=0),), parts=("again",)),
    "shared sequences of other ranks": PlannedCase(
        (Unit("encoders", (ENCODERS,), zero=0), Unit("llm", ({"backbone": 3},), first_rank=1, cp=2, zero=0))
    ),
}


def taken_in_steps(rank, num_ranks, cases):
    """By case: (stage, microbatch, encoder) -> bytes of its rows that wait for backward behind forward; and the most
    of all at a time. Each storage that sections of the backbone wait with counts once.
    """
    found, forward = [], _RunningPlan.forward

    def counted(running, action):
        forward(running, action)
        waiting = 0
        for (stage, microbatch), runs in running.tensors.runs.items():
            leaves = [
                (name, leaf) for run in runs if run.section.span.module == BACKBONE for name, leaf in run.taken.items()
            ]
            rows = {leaf.data_ptr(): (name, leaf.nbytes) for name, leaf in leaves if name != BACKBONE and len(leaf)}
            waiting += sum(size for _, size in rows.values())
            if (stage, microbatch) == (action.stage, action.microbatch):
                for name, size in rows.values():
                    found[-1][stage, microbatch, name] += size
        found[-1]["most"] = max(found[-1]["most"], waiting)

    for case in cases:
        found.append(defaultdict(int))
        step = build_step(case, torch.float32, BF16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_RunningPlan, "forward", counted)
            step.run(batches_of(case, step.place, build_hf_model(*case.built), 0))
    lengths = [assignment_of(batches_of(case, step.place, build_hf_model(*case.built), 0)).batch for case in cases]
    return found, lengths


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_stages_keep_the_rows_that_they_take_in(num_ranks):
    cases = [case for case in CASES.values() if case.num_ranks == num_ranks]
    of_ranks = run_ranks(taken_in_steps, num_ranks, cases)
    for number, case in enumerate(cases):
        plan, batch = case.plan(), of_ranks[0][1][number]
        program, cost = planned(plan), Analytic(plan.cluster, plan.precision)
        pricing = Pricing(plan, program, assign_batch(plan, batch, cost), cost)
        table = np.zeros((len(program.stages), pricing.assignment.num_microbatches))
        for index, stage in enumerate(program.stages):
            for name, row_bytes in taken_bytes(plan.model, stage.layers, 2, by_stage=True).items():
                predicted = row_bytes * pricing.layer_pricing.work.taken_in(name)
                table[index] += predicted
                for microbatch, size in enumerate(predicted.tolist()):
                    measured = [found[number].pop((index, microbatch, name), 0) for found, _ in of_ranks]
                    assert max(measured) == size, (case, index, microbatch, name)
        most = [found[number].pop("most", 0) for found, _ in of_ranks]
        assert table.any() and max(most) == high_water(program.program, table).max(), case
        assert not any(any(found[number].values()) for found, _ in of_ranks), case


FOUR = Case(phases="all", method="per_phase", num_examples=8)
CUTS = [
    Cut(FOUR, degrees=()),
    Cut(replace(FOUR, frozen=("image",)), degrees=()),
    Cut(FOUR, degrees=(4, 2), enters_again=True),
    Cut(FOUR, degrees=(4, 2), merges=True),
    Cut(FOUR, degrees=(4, 2), merges=True, tower="qwen3_vl"),
]


def taken_and_said(rank, num_ranks, cuts):
    """By case, bytes of rows that wait for backward on this rank of data parallelism behind the backbone's forward
    pass, and those that `RankMemory` says of the rank's sequences.
    """
    found, said, forward = [], [], StagePasses._forward

    def counted(passes, action):
        forward(passes, action)
        if passes._program.modules[action.stage] == BACKBONE:
            found.append(sum(rows.nbytes for rows in passes._tensors.arrived.values()))

    for cut in cuts:
        mesh, model = mesh_of(cut.case.fsdp.shard_size), model_of(cut)
        memory = RankMemory(plan_of(model_spec(model), num_ranks))
        shard(model, mesh, cut.case.fsdp)
        ((decision, lengths, examples),) = decided(cut, model, mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagePasses, "_forward", counted)
            TrainStep(model, mesh, once_a_step=True).run([assembled(decision, lengths, examples, mesh)])
        # Of a sequence the same without its items.
        without = replace(lengths, items={name: items.take_items([]) for name, items in lengths.items.items()})
        with_items, text = (memory(each)[BACKBONE] for each in (lengths, without))
        taken = (with_items.kept - text.kept)[decision.whole_on(rank)].sum()
        if (cuts_here := decision.cuts) is not None:
            own = cuts_here.rank == rank
            fragments = cuts_here.item[own], (cuts_here.end - cuts_here.begin)[own], cuts_here.units[own]
            taken += np.subtract(*(each.of_fragments(*fragments)[0] for each in (with_items, text))).sum()
        if cut.merges:
            taken += (with_items.whole.kept - text.whole.kept)[decision.backbone.ranks == rank].sum()
        said.append(int(taken))
    return found, said


def plan_of(spec, num_ranks):
    """A Plan of data parallelism in float64."""
    where = cluster("h100", num_nodes=1)
    device = replace(where.device, peak_flops={"fp64": 6.7e13})
    unit = Unit("all", (spec.num_blocks,), dp=num_ranks)
    return Plan(spec, replace(where, device=device), (unit,), num_ranks, 1, "data_parallel", precision="fp64")


@pytest.mark.slow
def test_data_parallel_ranks_keep_the_rows_that_their_sequences_take_in():
    """One that merges a sequence keeps those of all of its items, and else those whose places are there, about."""
    of_ranks = run_ranks(taken_and_said, 4, CUTS)
    for number, cut in enumerate(CUTS):
        kept, said = zip(*((found[number], said[number]) for found, said in of_ranks))
        assert sum(kept) > 0 and sum(kept) == pytest.approx(sum(said), abs=8), cut
        if cut.merges or not cut.degrees:
            assert kept == said, cut
