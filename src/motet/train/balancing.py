"""Builds the Orchestrator of a recipe: costs of items, predicted seconds, and checks that all ranks use the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from motet.assign.balancing import (
    Balancing,
    computed_as,
    cutting,
    device_type_of,
    operation_costs,
    recomputed_blocks,
)
from motet.balance import ACTIVE_BACKEND, Cost, ItemMemory, LengthWork, StepCosts
from motet.balance.costs import cost_of
from motet.core.cluster import Link
from motet.core.errors import JointUserError, UserError
from motet.core.exchange import NS_PER_S, Network
from motet.core.nodes import RanksPerNode
from motet.core.plan import Plan, Policy
from motet.core.sight import Sight
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.phases import PhaseTimes, Picoseconds, phase_times
from motet.cost.profile import PROFILE_FILE, Profile, read_profile
from motet.cost.profiled import message_fit
from motet.cost.source import is_measured_elsewhere
from motet.dispatch import BalanceConfig, Orchestrator
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.train.recipe.recipe import Recipe
from motet.train.world import World

_PS_PER_S = 10**12


@dataclass(frozen=True)
class MeasuredPhases:
    """What a profile measured of the phases of a model.

    link, inter_node: links of an exchange inside a node, and between nodes; None if not measured. If a profile has only
                      exchanges between nodes, both are this link.
    digest:           hash of the profile's file.
    file, device:     the file, and what its device is called there.
    """

    phases: Mapping[str, PhaseTimes]
    link: Link | None
    inter_node: Link | None
    digest: str
    file: Path
    device: str

    def elsewhere_words(self, here: str) -> str:
        """The sentence where it was measured on another device of the catalogue than the run's, `here`; else ""."""
        if not is_measured_elsewhere(self.device, here):
            return ""
        return (
            f"{self.file} was measured on {self.device}, and this run is on {here}: what items weigh in balancing is "
            "of another device; motet profile measures it here."
        )


def profile_of(recipe: Recipe) -> Path:
    """The file that a recipe with balance.cost = "profile" reads."""
    return recipe.balance.profile or recipe.run.dir / PROFILE_FILE


def read_measured(recipe: Recipe, spec: ModelSpec) -> MeasuredPhases | None:
    """The profile that a recipe balances by; None unless balance.cost is "profile".

    Raises UserError for a profile that is missing or broken, or is of another model or precision.
    """
    if recipe.balance.cost != "profile":
        return None
    path = profile_of(recipe)
    profile, precision = read_profile(path), recipe.fsdp.param_dtype or recipe.run.dtype
    if profile.precision != precision:
        raise UserError(
            f"balance.profile: {path} was measured in {profile.precision} and the recipe computes in {precision}; "
            "profile the recipe that is trained."
        )
    recomputed = recipe.fsdp.recomputed(spec.num_blocks)
    phases = {
        module.name: phase_times(profile, spec, module.name, recomputed.get(module.name, 0)) for module in spec.modules
    }
    for name, times in phases.items():
        if not times.linear_ps and not times.quadratic_ps:
            raise UserError(
                f"balance.profile: in {path} the seconds of {name!r} do not grow with the length; measure for longer: "
                "motet profile --seconds."
            )
    inside, between = (_exchange_link(profile, has_nodes=has_nodes) for has_nodes in (False, True))
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return MeasuredPhases(phases, inside or between, between, digest, path, profile.device)


def _exchange_link(profile: Profile, *, has_nodes: bool) -> Link | None:
    """The link fitted to the exchanges that were measured inside a node, or between nodes; None if there are none."""
    messages = [times for times in profile.messages if times.kind == "exchange" and (times.num_nodes > 1) == has_nodes]
    line = message_fit(*messages) if messages else None
    return Link(NS_PER_S / line.linear_ns, line.constant_ns / NS_PER_S) if line and line.linear_ns else None


def build_orchestrator(
    config: BalanceConfig,
    model: MLLM,
    num_ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    recompute: Mapping[str, int] = MappingProxyType({}),
    measured: MeasuredPhases | None = None,
    ranks_per_node: RanksPerNode | None = None,
    waits: bool = True,
    memory: ItemMemory | None = None,
) -> Orchestrator:
    """The Orchestrator of a model, the same on all ranks. dtype: of moved encoder outputs. Others: as in `step_costs`.

    waits: of the run's `FSDPConfig`. It counts where items may be cut: predictions of a Plan, which has whole items
           alone, take ranks to wait in each phase, and must decide as training does.
    memory: as of `StepTimes`, where items may be cut.
    Raises UserError if `config` does not fit the model.
    """
    spec = model_spec(model)
    for name, policy in config.policies(computed_as(spec)).items():
        if policy == "padded_attention" and name != BACKBONE and model.measured[name].cut is not None:
            raise UserError(
                f'balance.policy: "padded_attention" pads whole items, and those of {name!r} have segments; set '
                "another policy."
            )
    costs = step_costs(config, spec, recompute, device.type, dtype.itemsize, measured, ranks_per_node)
    times = cutting(costs.times, spec, recompute, dtype.itemsize)
    costs = replace(costs, times=replace(times, waits=waits or not config.cut_by, memory=memory))
    return _orchestrator(config, spec, costs, num_ranks, model.backbone.sight)


def recipe_orchestrator(
    recipe: Recipe, spec: ModelSpec, num_ranks: int, device_type: str, ranks_per_node: RanksPerNode
) -> Orchestrator:
    """The Orchestrator of a recipe, from the spec of its model. Raises UserError for costs that do not fit it."""
    recomputed, measured = recipe.fsdp.recomputed(spec.num_blocks), read_measured(recipe, spec)
    element_bytes = compute_dtype(recipe).itemsize
    costs = step_costs(recipe.balance, spec, recomputed, device_type, element_bytes, measured, ranks_per_node)
    return _orchestrator(recipe.balance, spec, costs, num_ranks, Sight.of_model(spec))


def _orchestrator(
    config: BalanceConfig, spec: ModelSpec, costs: StepCosts, num_ranks: int, sight: Sight
) -> Orchestrator:
    encoders = [module.name for module in spec.modules if module.name != BACKBONE]
    return Orchestrator(
        costs.costs,
        num_ranks,
        config.balanced(encoders),
        work=costs.work,
        times=costs.times,
        methods=config.methods,
        defers=costs.defers,
        sight=sight,
    )


def step_costs(
    config: BalanceConfig,
    spec: ModelSpec,
    recompute: Mapping[str, int],
    device_type: str,
    element_bytes: int,
    measured: MeasuredPhases | None,
    ranks_per_node: RanksPerNode | None = None,
    *,
    policy: Mapping[str, Policy] | None = None,
) -> StepCosts:
    """Costs and predicted seconds of the phases of a model, as `[balance]` sets them.

    recompute:      module -> number of its blocks that are recomputed.
    element_bytes:  bytes of an element of exchanged rows.
    measured:       the profile, if config.cost is "profile".
    ranks_per_node: of the ranks that exchange, as of `Network`.
    policy:         of a Plan, in place of that in `config`.
    Raises UserError for costs that do not fit the model.
    """
    speed = config.speed.resolved(device_type)
    counted = operation_costs(spec, recompute, speed, element_bytes, ranks_per_node)
    own = computed_as(spec)
    policies = config.policies(own) if policy is None else own | policy
    counted = replace(
        counted,
        times=replace(counted.times, link=_moving(counted.times.network, config)),
        defers=config.defer == "auto",
    )
    if config.cost == "length":
        costs, work = config.length_costs(policies)
        times = replace(counted.times, unit_s=_MeanSeconds(costs, work, counted))
        return replace(counted, costs=costs, work=work, times=times)
    costs = {name: cost_of(policies[name]) for name in counted.costs}
    counted = replace(counted, costs=costs)
    if config.cost == "flops":
        return counted
    assert measured is not None
    unit_s = dict.fromkeys(costs, 1 / _PS_PER_S)
    links = config.speed.links(measured.link or speed.link, measured.inter_node or speed.inter_node)
    link = _moving(Network(*links, ranks_per_node), config)
    return replace(
        counted, work=Picoseconds(measured.phases), times=replace(counted.times, unit_s=lambda _: unit_s, link=link)
    )


def _moving(network: Network, config: BalanceConfig) -> Network:
    """The network, with what moves over it moving as `config` says."""
    return replace(network, communicator=config.communicator, node_wise=config.node_wise)


def recipe_costs(recipe: Recipe, spec: ModelSpec, device_type: str) -> StepCosts:
    """The costs by which training balances a recipe. Raises UserError as `read_measured` and `step_costs` do."""
    recomputed = recipe.fsdp.recomputed(spec.num_blocks)
    measured = read_measured(recipe, spec)
    per_node = None if recipe.cluster is None else recipe.cluster.cluster().ranks_per_node
    return step_costs(recipe.balance, spec, recomputed, device_type, compute_dtype(recipe).itemsize, measured, per_node)


def stated_policy(config: BalanceConfig, spec: ModelSpec) -> dict[str, Policy]:
    """The phases that a recipe balances by another policy than they are computed by, as `Plan.policy` has them."""
    own = computed_as(spec)
    return {name: policy for name, policy in config.policies(own).items() if policy != own[name]}


def balancing_of(recipe: Recipe, spec: ModelSpec) -> Balancing:
    """Plan -> the costs by which training balances it.

    Raises UserError as `read_measured` and `step_costs` do, and for a communicator that predictions do not price.
    """
    if recipe.balance.communicator != "all_to_all":
        raise UserError(
            f'balance.communicator = "{recipe.balance.communicator}" is for training; steps are predicted with '
            '"all_to_all" alone, so remove it here.'
        )
    measured, element_bytes = read_measured(recipe, spec), compute_dtype(recipe).itemsize

    def balancing(plan: Plan) -> StepCosts:
        recomputed = recomputed_blocks(plan)
        return step_costs(
            recipe.balance,
            plan.model,
            recomputed,
            device_type_of(plan),
            element_bytes,
            measured,
            plan.replicas_by_node,
            policy=plan.policy,
        )

    return balancing


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype in which modules compute, and in which encoder outputs are moved."""
    return getattr(torch, recipe.fsdp.param_dtype or recipe.run.dtype)


@dataclass(frozen=True)
class _MeanSeconds:
    """Lengths of a microbatch -> seconds a unit of each phase's cost, on average, if the cost itself is no time."""

    costs: Mapping[str, Cost]
    work: LengthWork
    counted: StepCosts

    def __call__(self, lengths: BatchLengths) -> dict[str, float]:
        columns, unit_s = self.work(lengths), self.counted.times.unit_s(lengths)
        mean_s = {}
        for name, work in self.counted.work(lengths).items():
            total = int(self.costs[name].alone(columns[name]).sum())
            mean_s[name] = int(work.sum()) * unit_s[name] / total if total else 0.0
        return mean_s


def check_shared(config: BalanceConfig, model: MLLM) -> None:
    """Raise UserError if a recipe cuts sequences that must be whole for what the model does with them."""
    if config.cut_by and model.generators:
        raise UserError(
            f"balance.{config.cut_by} cannot cut sequences whose query tokens model.generators read whole; remove it."
        )


def check_same_backend(world: World) -> None:
    """Raise JointUserError if some ranks balance without the native core: they would not decide alike. A collective."""
    backends = world.gather(ACTIVE_BACKEND)
    if len(set(backends)) > 1:
        raise JointUserError(
            f"Rank {backends.index('fallback')} balances without the native core and rank {backends.index('native')} "
            "with it, so they would not decide alike: install the same build of Motet on all machines."
        )


def check_same_profile(world: World, measured: MeasuredPhases | None) -> None:
    """Raise JointUserError if ranks have read different profiles: they would not decide alike. A collective."""
    digests = world.gather(measured and measured.digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise JointUserError(
            f"Rank {other} has read another profile than rank 0, so they would not decide alike: copy one file to all "
            "machines, or name one that all of them see in balance.profile."
        )
