"""The step of a Plan of data parallelism on this rank, as training makes it, and its microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from motet.assign.whole_step import decide_step
from motet.core.plan import Plan
from motet.core.workload import home_ranks
from motet.dispatch import BalanceConfig, Orchestrator, RankBatch, assemble
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.dropout import example_keys
from motet.models.mllm import MLLM
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator
from motet.train.optimizer import build_optimizer
from motet.train.planned_job import divide_whole

if TYPE_CHECKING:
    from parity.planned import PlannedCase


class DataParallelRun:
    """A case whose Plan has the schedule "data_parallel", on this rank."""

    def __init__(self, case: PlannedCase, device: torch.device, stored: torch.dtype) -> None:
        """A collective."""
        from parity.planned import OPTIMIZER, optimizer_named

        self._case, self._plan = case, case.plan()
        (unit,) = self._plan.units
        fsdp = _fsdp_of(self._plan, case.is_mixed)
        mesh = build_mesh(
            device, shard_size=fsdp.shard_size, tensor_size=unit.tp, tensor_pieces=self._plan.cluster.tensor_pieces
        )
        model = case.model().to(device, stored)
        model.train()
        shard(model, mesh, fsdp, {} if mesh.tensor is None else divide_whole(model, mesh.tensor))
        optimizer = build_optimizer(model, optimizer_named(case.optimizer))
        self.step = TrainStep(model, mesh, optimizer, max_grad_norm=OPTIMIZER.clip_norm, once_a_step=fsdp.once_a_step)

    def batches(self, number: int, whole: MLLM) -> list[RankBatch]:
        """This rank's microbatches of a step. whole: the model as one process has it."""
        case, mesh, (unit,) = self._case, self.step.mesh, self._plan.units
        examples, phases = case.examples(number), tuple(whole.measured)
        count = case.batch_size // (unit.dp * case.microbatch_size)
        home = np.tile(home_ranks(len(examples) // count, unit.dp), count)
        lengths = LoadedTables.read([tables_of(examples, phases, whole.measured)], phases).lengths
        step, batches = decide_step(self._orchestrator, replace(lengths, home=home), count), []
        for part in step.microbatches:
            kept = case.kept(number)[part.examples]
            chosen = [examples[index] for index in part.examples[kept]]
            decision, of_part = part.decision.keep(kept, part.lengths), part.lengths.keep(kept)
            items = {p: [m for e in chosen for q, m in zip(e.sequence.media, e.media) if q == p] for p in phases}
            batch = assemble(
                decision,
                of_part,
                mesh.rank,
                [chosen[index].sequence for index in decision.sequences_on(mesh.rank)],
                {phase: [items[phase][index] for index in decision.items_on(phase, mesh.rank)] for phase in phases},
            )
            if case.dropout or case.made:
                batch = batch.with_draws(example_keys(case.seed, number, part.examples[kept]))
            batches.append(batch.to(mesh.device, dtype=torch.float64))
        return batches

    @cached_property
    def _orchestrator(self) -> Orchestrator:
        (unit,), balance = self._plan.units, self._case.balance
        config = BalanceConfig(**({"phases": "off"} if balance == "off" else {"phases": "all", "method": balance}))
        recompute = dict(unit.recompute[0]) if unit.recompute else {}
        return build_orchestrator(
            config, self._case.model(), unit.dp, torch.device("cpu"), torch.float64, recompute=recompute
        )


def _fsdp_of(plan: Plan, is_mixed: bool) -> FSDPConfig:
    (unit,) = plan.units
    size = (unit.shard_size or unit.dp) if unit.zero else 1
    return FSDPConfig(
        shard_size=size,
        reshard_after_forward=unit.zero == 3,
        once_a_step=unit.zero == 1 and size > 1,
        recompute={name: count for name, count in unit.recompute[0].items() if count} if unit.recompute else False,
        param_dtype="float32" if is_mixed else None,
        reduce_dtype="float64" if is_mixed else None,
    )
