"""A job that trains under a Plan whose ranks hold different parts of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.heap import keep_freed_memory
from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.dispatch.context import ContextConfig
from motet.expert_ranks import ExpertRanks
from motet.models.context_items import GROUP_CAST, ULYSSES
from motet.models.divided import cuts_of, divide, split_fused, why_undivided
from motet.models.experts import expert_parameters, spread_experts
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.part import keep_spans, names_of_spans
from motet.peer_copies import check_device, open_copies
from motet.runtime.clock import ActionClock
from motet.runtime.groups import wait_limit
from motet.runtime.held import HeldParameters, share_out_part
from motet.runtime.holders import Holders, sharing_groups
from motet.runtime.loss_scale import LossScale
from motet.runtime.mesh import Mesh
from motet.runtime.p2p import Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.sections import is_layered
from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes
from motet.runtime.unit_groups import OpenCopies, UnitGroups
from motet.schedule import PlannedProgram, parts_of, planned, validate
from motet.schedule.plan_units import can_share_items, cuts_sequences
from motet.tensor_parallel import TensorRanks
from motet.train.optimizer import build_optimizer
from motet.train.recipe.recipe import Recipe
from motet.train.world import StartedRanks, World


@dataclass(frozen=True)
class ChosenPlan:
    """The Plan that a run trains under.

    file:      where it was read.
    replan_on: the command that plans anew for a cluster.
    whose:     whose model must be the Plan's.
    """

    plan: Plan
    file: Path
    replan_on: Callable[[Cluster], str]
    whose: str = "the recipe's"

    @property
    def replan(self) -> str:
        """The command that plans anew for the Plan's cluster."""
        return self.replan_on(self.plan.cluster)

    def check_fits(self, spec: ModelSpec, world: World) -> None:
        """Raise UserError if the Plan is for another model than `spec`, or for other ranks than there are."""
        self.check_model(spec)
        ranks = self.plan.ranks
        if len(ranks) != world.num_ranks:
            here = replace(self.plan.cluster, num_nodes=world.num_nodes, ranks_per_node=world.ranks_per_node)
            raise UserError(
                f"{self.file} is for {counted_words(len(ranks), 'rank')}, and {world.num_ranks} run; start torchrun "
                f"with {counted_words(len(ranks), 'rank')}, or plan anew: {self.replan_on(here)}."
            )
        if self.plan.copies_pieces:
            check_device(world.device)

    def used(self, started: StartedRanks, *, in_phase: bool = False) -> tuple[int, ...] | None:
        """Which of the ranks that torchrun has started the Plan uses, where it leaves over some of those that it needs
        to be started. None: all must be the Plan's (`check_fits`).

        in_phase: more may be started, as another phase may use them.
        """
        needed, used = self.plan.needed_cluster, tuple(sorted(self.plan.ranks))
        is_needed = (started.num_nodes, started.ranks_per_node) == (needed.num_nodes, needed.ranks_per_node)
        if in_phase and started.num_nodes >= needed.num_nodes:
            is_needed |= started.ranks_per_node == self.plan.cluster.ranks_per_node
            is_needed |= needed.num_nodes == 1 and started.ranks_per_node >= needed.ranks_per_node
        return used if is_needed and len(used) < started.num_ranks else None

    def check_model(self, spec: ModelSpec) -> None:
        """Raise UserError if the Plan is for another model than `spec`.

        Items that ranks could share, and have whole in the Plan, stay whole. A model in hand may have an encoder or
        callbacks with which none can be shared.
        """
        model = replace(self.plan.model, name=spec.name)
        if model == spec:
            return
        if _unshared(model) != _unshared(spec):
            raise UserError(
                f"{self.file} is for another model than {self.whose} ({self._difference(spec)}); plan anew: "
                f"{self.replan}."
            )

        for theirs, ours in zip(model.modules, spec.modules, strict=True):
            can_be = ours.shareable and (ours.tile_rows, ours.token_parts) == (theirs.tile_rows, theirs.token_parts)
            if theirs.shareable and not can_be and can_share_items(self.plan, theirs.name):
                raise UserError(
                    f"{self.file} is for another model than {self.whose}: its ranks share items of {theirs.name}, "
                    f"which cannot be in the model in hand; plan anew: {self.replan}."
                )

    def _difference(self, spec: ModelSpec) -> str:
        theirs, ours = self.plan.model.num_blocks, spec.num_blocks
        if theirs != ours:
            return f"it has blocks {_counts(theirs)}, {self.whose} has {_counts(ours)}"
        other = [module.name for module in spec.modules if module != self.plan.model.module(module.name)]
        return f"layers of {', '.join(other)} differ" if other else "modules feed others"


def _unshared(spec: ModelSpec) -> ModelSpec:
    """The model as if ranks could share the items of no module, nor had sequences merged whole."""
    whole = (replace(module, shareable=False, tile_rows=0, token_parts=1) for module in spec.modules)
    return replace(spec, modules=tuple(whole), merges=False)


def _counts(num_blocks: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in num_blocks.items())


def check_cuts(model: MLLM, plan: Plan) -> None:
    """Raise UserError for an encoder that the Plan cuts, or recomputes in part, where that cannot be."""
    if what := impossible_cut(model, plan):
        raise UserError(f"The plan's {what}.")


def impossible_cut(model: MLLM, plan: Plan) -> str:
    """What a Plan does with an encoder or a generator that has no such parts, as "unit 'x' cuts ..."; "" if nothing."""
    in_parts = _modules_in_parts(plan)
    in_halves = {name for name, is_halved in in_parts.items() if is_halved}
    for unit in plan.units:
        for name in unit.modules:
            if unit.tp > 1 and (why := why_undivided(model, name)):
                return f"unit {unit.name!r} has tp {unit.tp}, and {name!r} cannot be divided: {why}"
            if plan.schedule == "data_parallel":
                continue
            if name == BACKBONE:
                continue
            if name in model.generators:
                if sum(name in stage for stage in unit.stages) > 1 and (why := model.generators[name].uncuttable):
                    return f"unit {unit.name!r} cuts {name!r}, which cannot be: {why}"
                if not model.generators[name].blocks and any(one.get(name) for one in unit.recompute):
                    return f"unit {unit.name!r} recomputes {name!r}, which cannot be: this generator is one block"
                continue
            encoder = model.encoders[name]
            for stop in accumulate(stage.get(name, 0) for stage in unit.stages):
                if why := encoder.unsendable(stop):
                    return f"unit {unit.name!r} cuts {name!r} before its projector, which cannot be: {why}"
            num_stages = sum(name in stage for stage in unit.stages)
            what = f"cuts {name!r} into {num_stages} stages" if num_stages > 1 else ""
            if not what and name in in_parts:
                what = f"fills bubbles with parts of {name!r}"
            if not what and is_layered(plan.model.module(name)) and any(one.get(name) for one in unit.recompute):
                what = f"recomputes blocks of {name!r}"
            if what and (why := encoder.uncuttable):
                return f"unit {unit.name!r} {what}, which cannot be cut between its blocks: {why}"
            if name in in_halves and (why := encoder.unhalvable):
                return f"unit {unit.name!r} fills bubbles with halves of blocks of {name!r}, which cannot be: {why}"
    return ""


def check_context(plan: Plan, context: ContextConfig) -> None:
    """Raise UserError for a way in which ranks that share sequences exchange rows, and cannot or need not."""
    unit, layers = plan.unit_of(BACKBONE), plan.model.module(BACKBONE).layers
    attention = next(layer.attention for layer in layers if layer.attention is not None)
    if unit.cp == 1 and cuts_sequences(plan):
        # Ranks that share a sequence do not know the others', so that one way is left.
        if context.exchange not in ("auto", GROUP_CAST):
            raise UserError(
                f"context.exchange is {context.exchange!r}, and replicas that share sequences, by the plan's balance "
                f"'split', exchange keys by {GROUP_CAST!r}; set that, or leave it out."
            )
    elif unit.cp == 1:
        check_context_unused(context)
    heads, kv_heads = attention.num_heads // unit.tp, attention.num_kv_heads // unit.tp
    if context.exchange == ULYSSES and heads % unit.cp:
        raise UserError(
            f"context.exchange is {context.exchange!r}, and the {unit.cp} context-parallel ranks (cp) of unit "
            f"{unit.name!r} do not divide the {counted_words(heads, 'head')} of a rank; set {GROUP_CAST!r}."
        )
    if kv_heads % context.head_groups:
        raise UserError(
            f"context.head_groups is {context.head_groups}, and does not divide the {counted_words(kv_heads, 'head')} "
            "of keys and values of a rank; set a number that does."
        )


def check_context_unused(context: ContextConfig, cut_by: str = "") -> None:
    """Raise UserError for settings of ranks that share sequences, where none do by `cp`.

    cut_by: the setting of `[balance]` by which some share them; "": none.
    """
    why = "but no ranks share a sequence"
    if cut_by:
        why = f"and ranks that share sequences by balance.{cut_by} exchange keys by {GROUP_CAST!r}, all heads at once"
    for name, setting in context.model_dump(exclude_defaults=True).items():
        raise UserError(
            f"context.{name} is {setting!r}, {why}: leave it out, or train under a plan whose backbone has cp above 1."
        )


def unused_pieces(recipe: Recipe, plan: Plan | None) -> str:
    """The sentence on `cluster.tensor_pieces` of a recipe where no ranks share products; "" where some do.

    It is no error: `[cluster]` is what the recipe is planned for, and the fastest Plan may have no such ranks.
    """
    pieces = recipe.cluster.tensor_pieces if recipe.cluster is not None else 1
    if pieces == 1 or (plan is not None and any(unit.tp > 1 for unit in plan.units)):
        return ""
    why = "without a plan none do" if plan is None else "no unit of the plan has tp above 1"
    return f"cluster.tensor_pieces = {pieces} has no effect on this run: it cuts products that ranks share, and {why}."


def opening_copies(device: torch.device) -> OpenCopies:
    """What opens the PeerCopies of a group of ranks on such devices; they wait for each other as in collectives."""
    return lambda group: open_copies(group, device, wait_limit(device))


def _modules_in_parts(plan: Plan) -> dict[str, bool]:
    """The modules of which some blocks run in one part of a pass, and others in another.

    Module -> whether the halves of any block do.
    """
    found: dict[str, bool] = {}
    for stage in planned(plan).stages if plan.fills else ():
        parts = parts_of(stage, plan.model)
        for name, num in Counter(name for part in parts for name in part.layers).items():
            if num > 1 or stage.has_sums:  # What stands behind its blocks runs apart from them.
                halved = (part.ends_inside and part.modules[-1] == name for part in parts)
                found[name] = found.get(name, False) or any(halved)
    return found


def holders_of(model: MLLM, program: PlannedProgram) -> dict[str, Holders]:
    """Name of each parameter -> who holds it, over all stages with blocks that use it; the same on all ranks.

    model: whole; its parameters may be on meta. Raises UserError for a parameter that no layer of its module has.
    """
    ranks: dict[str, set[int]] = {}
    stages: dict[str, list[int]] = {}
    names: dict[tuple[tuple[str, tuple[int, int]], ...], set[str]] = {}  # Replicas hold the same.
    for number, stage in enumerate(program.stages):
        spans = tuple(stage.layers.items())
        if spans not in names:
            names[spans] = names_of_spans(model, stage.layers)
        for name in names[spans]:
            ranks.setdefault(name, set()).update(stage.data_ranks)
            stages.setdefault(name, []).append(number)
    if left := [name for name, _ in model.named_parameters() if name not in ranks]:
        raise UserError(f"The weight {left[0]} belongs to no block of its module, so no stage of a plan can hold it.")
    cuts = {name: cut for module in _divided(program) for name, cut in cuts_of(model, module).items()}
    spread = set(_names_of_experts(model))
    return {
        name: Holders(tuple(sorted(ranks[name])), tuple(stages[name]), cuts.get(name), name in spread) for name in ranks
    }


def split_products(model: MLLM, program: PlannedProgram) -> None:
    """Split products of a whole model, in place, of the modules that tensor-parallel ranks divide (`split_fused`)."""
    split_fused(model, _divided(program))


def _divided(program: PlannedProgram) -> set[str]:
    """The modules that tensor-parallel ranks divide."""
    return {name for stage in program.stages for name in stage.layers if stage.unit.tp > 1}


def divide_part(model: MLLM, place: Place, groups: UnitGroups) -> None:
    """Change the layers of this rank's part, in place, to those of a tensor-parallel or an expert-parallel rank."""
    if groups.experts is not None and BACKBONE in place.modules:
        index, size = place.expert_ranks.index(place.rank), len(place.expert_ranks)
        spread_experts(model.backbone.blocks, ExpertRanks(groups.experts, index, size, groups.sent))
    chunks = place.program.layout.plan.cluster.tensor_pieces
    for unit, modules in place.units:
        if (group := groups.tensor.get(unit.name)) is not None:
            ranks = TensorRanks(group, place.t_of(unit), unit.tp, groups.sent, chunks, groups.copies.get(group))
            divide(model, dict.fromkeys(modules, ranks), place.with_sums)


def divide_whole(model: MLLM, mesh: Mesh) -> tuple[dict[str, int], list[str]]:
    """Change the layers of a whole model, in place, to those of a rank of data parallelism that shares some.

    Returns name -> the dimension in which tensor-parallel ranks cut a parameter, which is whole yet, and the names of
    parameters of experts that ranks share, as `runtime.fsdp.shard` takes both.
    """
    cuts: dict[str, int] = {}
    experts = [] if mesh.experts is None else _names_of_experts(model)
    if mesh.experts is not None:
        spread_experts(model.backbone.blocks, mesh.experts)
    if mesh.tensor is not None:
        names = (BACKBONE, *model.encoders, *model.generators)
        split_fused(model, names)
        cuts = {name: cut for module in names for name, cut in cuts_of(model, module).items() if name not in experts}
        divide(model, dict.fromkeys(names, mesh.tensor))
    return cuts, experts


def _names_of_experts(model: MLLM) -> list[str]:
    """The names of the parameters of all experts of a whole model."""
    experts = {id(parameter) for parameter in expert_parameters(model.backbone.blocks)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in experts]


def connected(place: Place, world: World) -> Lanes:
    """The lanes of this rank, each tried once. A collective, which fails on all ranks if it fails on one."""
    with world.together():
        # All ranks come to the same: what is accepted ends on all of them.
        holds_up = not place.program.layout.plan.cluster.device.overlaps
        validate(place.program.program, holds_up=holds_up, host_waits=world.device.type == "cpu")
    lanes = Lanes(place.pairs, world.rank, world.device)
    with world.together():
        lanes.connect()
    return lanes


@dataclass(frozen=True)
class PartConfig:
    """How a rank's part of a model is made.

    fill:          gives the part its weights, on the rank's device. optimizer: makes the optimizer of the part.
    max_grad_norm, loss_scale: as of `PlannedStep`. types: those in which it computes.
    """

    fill: Callable[[MLLM], object]
    optimizer: Callable[[MLLM], torch.optim.Optimizer]
    max_grad_norm: float | None = None
    types: ComputeTypes = SAME_TYPES
    loss_scale: LossScale | None = None

    @staticmethod
    def of_recipe(recipe: Recipe, device: torch.device) -> PartConfig:
        """The part of a model that was laid out without memory, with the weights that the recipe says."""
        return PartConfig(
            lambda model: materialise(model, recipe.modules, recipe.run.seed, device),
            lambda model: build_optimizer(model, recipe.optimizer),
            recipe.optimizer.clip_norm,
            recipe.fsdp.types,
            recipe.fsdp.scale,
        )


def build_part(
    model: MLLM, spec: ModelSpec, place: Place, config: PartConfig, mesh: Mesh, world: World
) -> tuple[PlannedStep, torch.optim.Optimizer]:
    """Reduce a model, in place, to this rank's part, give it its weights, and make its step. A collective.

    model: whole. spec: its own.
    """
    with world.together():
        split_products(model, place.program)
        holders = holders_of(model, place.program)
    weights = {name: module.weight for name, module in model.generators.items()}
    unit_groups = UnitGroups.of(place)
    groups = {**unit_groups.by_ranks(place), **sharing_groups(place.program, holders.values())}
    if place.program.layout.plan.copies_pieces:
        with world.together():  # Of its own, as ranks may meet in none of what follows if some have failed here.
            unit_groups.copy(opening_copies(world.device))
    with world.together():
        keep_spans(model, *place.stage_spans)
        divide_part(model, place, unit_groups)
        share_out_part(model, place, holders, groups, world.device, config.types)
        config.fill(model)
        held = HeldParameters(model, place, holders, groups, config.types)
        optimizer = config.optimizer(model)
    lanes = connected(place, world)
    keep_freed_memory(world.device.type)
    world.barrier()  # The clocks of all ranks start at the same moment.
    step = PlannedStep(
        model,
        spec,
        place,
        lanes,
        mesh,
        held,
        unit_groups,
        optimizer,
        weights=weights,
        max_grad_norm=config.max_grad_norm,
        loss_scale=config.loss_scale,
        clock=ActionClock(world.rank, world.device),
    )
    return step, optimizer
