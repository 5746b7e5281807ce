"""The step of a Plan of data parallelism on this rank, as training makes it, and its microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from motet.assign.whole_step import decide_step
from motet.core.workload import home_ranks
from motet.dispatch import Orchestrator, RankBatch
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.dropout import example_keys
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planning.plan_of_recipe import recipe_of_plan
from motet.runtime.fsdp import shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.planned_job import divide_whole
from motet.train.recipe.recipe import Recipe
from parity.test_gradients import assembled
from peer_memory import opening_copies

if TYPE_CHECKING:
    from parity.planned import PlannedCase


@cache
def recipe_of_case(is_mixed: bool) -> Recipe:
    """What a Plan is asked of a recipe, as `PlannedCase` trains."""
    return Recipe.model_validate(
        {
            "run": {"dir": "run", "steps": 1, "batch_size": 1, "dtype": "float64"},
            "model": {"backbone": {"family": "qwen2", "path": "weights"}},
            "data": {"train": ["train.jsonl"], "tokenizer": "tokenizer"},
            "optimizer": {"lr": 1e-4},
            "fsdp": {"param_dtype": "float32", "reduce_dtype": "float64"} if is_mixed else {},
        }
    )


class DataParallelRun:
    """A case whose Plan has the schedule "data_parallel", on this rank, by the recipe that its Plan makes."""

    def __init__(
        self, case: PlannedCase, optimizer: OptimizerConfig, device: torch.device, stored: torch.dtype
    ) -> None:
        """A collective."""
        plan = case.plan()
        self._case, self._recipe = case, recipe_of_plan(plan, recipe_of_case(case.is_mixed))
        fsdp, tensor_size = self._recipe.fsdp, plan.units[0].tp
        mesh = build_mesh(
            device,
            shard_size=fsdp.shard_size,
            tensor_size=tensor_size,
            tensor_pieces=plan.cluster.tensor_pieces,
            expert_size=plan.units[0].ep,
        )
        if plan.copies_pieces:
            mesh = mesh.copying(opening_copies(device))
        model = case.model().to(device, stored)
        model.train()
        shard(model, mesh, fsdp, *divide_whole(model, mesh))
        self.step = TrainStep(
            model,
            mesh,
            build_optimizer(model, optimizer),
            max_grad_norm=optimizer.clip_norm,
            once_a_step=fsdp.once_a_step,
        )

    def batches(self, number: int, whole: MLLM) -> list[RankBatch]:
        """This rank's microbatches of a step. whole: the model as one process has it."""
        case, mesh, count = self._case, self.step.mesh, self._recipe.run.microbatches
        examples, phases = case.examples(number), tuple(whole.measured)
        home = np.tile(home_ranks(len(examples) // count, mesh.num_ranks), count)
        lengths = LoadedTables.read([tables_of(examples, phases, whole.measured)], phases).lengths
        step, batches = decide_step(self._orchestrator, replace(lengths, home=home), count), []
        for part in step.microbatches:
            kept = case.kept(number)[part.examples]
            chosen = [examples[index] for index in part.examples[kept]]
            batch = assembled(chosen, part.lengths.keep(kept), part.decision.keep(kept, part.lengths), mesh)
            if case.dropout or case.made:
                batch = batch.with_draws(example_keys(case.seed, number, part.examples[kept]))
            batch = self.step.prepared(batch, self._recipe.fsdp.types.compute or torch.float64)
            batches.append(batch.to(mesh.device, dtype=torch.float64))
        return batches

    @cached_property
    def _orchestrator(self) -> Orchestrator:
        model, num_ranks = self._case.model(), self.step.mesh.num_ranks
        recompute = self._recipe.fsdp.recomputed(model_spec(model).num_blocks)
        cpu = torch.device("cpu")
        nodes = self._case.plan().replicas_by_node
        return build_orchestrator(
            self._recipe.balance, model, num_ranks, cpu, torch.float64, recompute=recompute, ranks_per_node=nodes
        )
