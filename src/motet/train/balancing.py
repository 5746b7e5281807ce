"""The Orchestrator of a model: what its modules cost, from which seconds a way is chosen, and by which core."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from motet.balance import ACTIVE_BACKEND, Cost
from motet.core.cluster import Link
from motet.core.errors import UserError
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.fit import NS_PER_S
from motet.cost.flops import batch_flops
from motet.cost.phases import PhaseTimes, phase_times
from motet.cost.profile import PROFILE_FILE, read_profile
from motet.cost.profiled import message_fit
from motet.dispatch import BalanceConfig, Orchestrator, SpeedConfig, StepTimes
from motet.models.module import MLLM
from motet.models.spec import model_spec
from motet.runtime.stage import is_trainable, modules_by_phase
from motet.train.recipe import Recipe
from motet.train.world import JointUserError, World

_PS_PER_S = 10**12


@dataclass(frozen=True)
class MeasuredPhases:
    """What a profile says of the phases of a model.

    link:   of an exchange; None where the profile was made on one rank. digest: of the file.
    """

    phases: Mapping[str, PhaseTimes]
    link: Link | None
    digest: str


def read_measured(recipe: Recipe, model: MLLM) -> MeasuredPhases | None:
    """None unless the recipe balances on measured cost.

    Raises UserError for a profile that is missing or broken, or is of another model or precision.
    """
    if recipe.balance.cost != "profile":
        return None
    path = recipe.balance.profile or recipe.run.dir / PROFILE_FILE
    profile, precision = read_profile(path), recipe.fsdp.param_dtype or recipe.run.dtype
    if profile.precision != precision:
        raise UserError(
            f"balance.profile: {path} was measured in {profile.precision} and the recipe computes in {precision}; "
            "profile the recipe that is trained."
        )
    spec = model_spec(model)
    phases = {
        module.name: phase_times(profile, spec, module.name, recompute=recipe.fsdp.recompute) for module in spec.modules
    }
    for name, times in phases.items():
        if not times.linear_ps and not times.quadratic_ps:
            raise UserError(
                f"balance.profile: in {path} the seconds of {name!r} do not grow with the length; measure for longer: "
                "motet profile --seconds."
            )
    exchange = [times for times in profile.messages if times.kind == "exchange"]
    line = message_fit(*exchange) if exchange else None
    link = Link(NS_PER_S / line.linear_ns, line.constant_ns / NS_PER_S) if line and line.linear_ns else None
    return MeasuredPhases(phases, link, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest())


def build_orchestrator(
    config: BalanceConfig,
    model: MLLM,
    num_ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    measured: MeasuredPhases | None = None,
) -> Orchestrator:
    """All ranks call it alike. dtype: that encoder outputs are moved in. measured: in place of stated costs and speeds.

    Raises UserError for what in `config` does not fit the model.
    """
    modules = modules_by_phase(model)
    costs = config.phase_costs({name: module.cost for name, module in model.encoders.items()})
    speed = config.speed.resolved(device.type)
    link, seconds = speed.link, _CountedSeconds(model_spec(model), speed)
    if measured is not None:
        costs = {
            name: type(cost)(measured.phases[name].linear_ps, measured.phases[name].quadratic_ps)
            for name, cost in costs.items()
        }
        seconds = _MeasuredSeconds(costs, measured.phases[BACKBONE].target_ps)
        link = _link(config.speed, speed, measured.link)
    times = StepTimes(
        seconds=seconds,
        link=link,
        token_bytes=model.backbone.dim * dtype.itemsize,
        frozen=frozenset(name for name, module in modules.items() if not is_trainable(module)),
    )
    return Orchestrator(costs, num_ranks, config.balanced(model.encoders), times=times, methods=config.methods)


@dataclass(frozen=True)
class _CountedSeconds:
    """Seconds of the phases of a microbatch from operations that are counted, at a stated speed."""

    spec: ModelSpec
    speed: SpeedConfig

    def __call__(self, lengths: BatchLengths) -> dict[str, float]:
        return {name: flops / self.speed.flops_per_s for name, flops in batch_flops(self.spec, lengths).items()}


@dataclass(frozen=True)
class _MeasuredSeconds:
    """Seconds of the phases of a microbatch, from costs in picoseconds. target_ps: of a token with loss."""

    costs: Mapping[str, Cost]
    target_ps: int

    def __call__(self, lengths: BatchLengths) -> dict[str, float]:
        picoseconds = {
            name: int(cost.alone(lengths.sequence if name == BACKBONE else lengths.items[name].length).sum())
            for name, cost in self.costs.items()
        }
        picoseconds[BACKBONE] += self.target_ps * int(lengths.num_targets.sum())
        return {name: total / _PS_PER_S for name, total in picoseconds.items()}


def _link(given: SpeedConfig, resolved: SpeedConfig, measured: Link | None) -> Link:
    """What the recipe states of the link, else what was measured, else what is assumed."""
    if measured is None:
        return resolved.link
    return Link(
        measured.bytes_per_s if given.link_gbytes_per_s is None else resolved.link.bytes_per_s,
        measured.latency_s if given.link_latency_us is None else resolved.link.latency_s,
    )


def check_same_backend(world: World) -> None:
    """Ranks decide alike with the same core only. A collective; raises JointUserError where it is not the same."""
    found = world.gather(ACTIVE_BACKEND)
    if len(set(found)) > 1:
        raise JointUserError(
            f"Rank {found.index('fallback')} balances without the native core and rank {found.index('native')} with "
            "it, so they would not decide alike: install the same build of Motet on all machines."
        )


def check_same_profile(world: World, measured: MeasuredPhases | None) -> None:
    """Ranks decide alike from the same profile only. A collective; raises JointUserError where it is not the same."""
    found = world.gather(measured and measured.digest)
    other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
    if other is not None:
        raise JointUserError(
            f"Rank {other} has read another profile than rank 0, so they would not decide alike: copy one file to all "
            "machines, or name one that all of them see in balance.profile."
        )
