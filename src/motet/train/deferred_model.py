"""The model of a job before it has weights, with its vocabulary, and what must hold of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from motet.balance import ItemMemory
from motet.core.errors import UserError
from motet.core.spec import ModelSpec
from motet.data.drawn import DrawnVocabulary
from motet.data.manifest import Manifest
from motet.data.remote import is_url
from motet.data.text import ChatTokenizer
from motet.dispatch import Orchestrator
from motet.models.build import build_mllm
from motet.models.compiling import check_compiler, why_not_compiled
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.item_memory import RankMemory
from motet.runtime.stage import modules_by_phase
from motet.train.balancing import MeasuredPhases, build_orchestrator, check_shared, compute_dtype, read_measured
from motet.train.export import check_export
from motet.train.input.rows import check_rows
from motet.train.optimizer import check_groups, check_learns
from motet.train.planned_job import ChosenPlan, check_cuts
from motet.train.recipe.recipe import Recipe
from motet.train.recompute import RecomputeRanks, plan_alone
from motet.train.world import World

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class DeferredModel:
    """The model of a job without stages, before it has weights, and what its items weigh.

    measured: the profile that it balances by, if it does. memory: of `StepTimes`.
    """

    vocabulary: ChatTokenizer | DrawnVocabulary
    model: MLLM
    spec: ModelSpec
    measured: MeasuredPhases | None
    memory: ItemMemory | None

    @classmethod
    def of(cls, recipe: Recipe, world: World, ranks: RecomputeRanks, chosen: ChosenPlan | None) -> DeferredModel:
        """The model of a recipe. Raises UserError for what cannot be trained, or not by these ranks."""
        vocabulary, model = build_deferred(recipe)
        check_compiles(recipe, model, world)
        check_shared(recipe.balance, model)
        spec = model_spec(model)
        if chosen is not None:
            chosen.check_fits(spec, world)
            check_cuts(model, chosen.plan)
        return cls(vocabulary, model, spec, read_measured(recipe, spec), _item_memory(recipe, spec, ranks))

    def orchestrator(self, recipe: Recipe, replicas: World, waits: bool) -> Orchestrator:
        """What balances the items of a step. waits: whether ranks wait for each other in each pass."""
        return build_orchestrator(
            recipe.balance,
            self.model,
            replicas.num_ranks,
            replicas.device,
            compute_dtype(recipe),
            recompute=recipe.fsdp.recomputed(self.spec.num_blocks),
            measured=self.measured,
            ranks_per_node=replicas.by_node,
            waits=waits,
            memory=self.memory,
        )


def check_ahead(recipe: Recipe) -> None:
    """Raise UserError for what is wrong with a run that begins later and shows before any example is read."""
    build_deferred(recipe)
    for manifest in (*recipe.data.train, *recipe.data.heldout):
        if not (recipe.data.is_split or is_url(manifest)):
            Manifest.find(manifest)


def build_deferred(recipe: Recipe) -> tuple[ChatTokenizer | DrawnVocabulary, MLLM]:
    """The vocabulary, and the whole model without weights. Raises UserError for what does not fit it."""
    vocabulary, run = recipe.vocabulary(), recipe.run
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, _DTYPES[run.dtype], run.seed, deferred=True)
    check_rows(recipe, model)
    check_learns(model)
    check_export(recipe)
    check_groups(model, recipe.optimizer)
    return vocabulary, model


def check_compiles(recipe: Recipe, model: MLLM, world: World) -> None:
    """Raise UserError where blocks cannot be compiled, if they are to be."""
    if not recipe.run.compile:
        return
    what = "generators, whose noise is drawn by item" if model.generators else ""
    if what := what or why_not_compiled(modules_by_phase(model).values()):
        raise UserError(f"run.compile cannot compile a model with {what}; remove run.compile.")
    check_compiler(world.device.type)


def _item_memory(recipe: Recipe, spec: ModelSpec, ranks: RecomputeRanks) -> ItemMemory | None:
    """What items take of a rank's memory, where it is known and items may be cut.

    None too where the model alone does not fit by prediction: then no item is to blame, and nothing is cut for it.
    """
    if not ranks.memory_bytes or not recipe.balance.cut_by:
        return None
    memory = RankMemory(plan_alone(recipe, spec, ranks))
    return memory if memory.room_bytes > 0 else None
