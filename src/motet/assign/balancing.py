"""What a Plan's colocated phases are balanced by: the work and the seconds that training decides from.

A prediction places items where training will, so it weighs them alike: by operations at the speeds that training is
told or assumes, not by the seconds of the cost model, which knows the devices better than a recipe does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motet.balance import ASSUMED_SPEEDS, Packed, Padded, Speed, StepCosts, StepTimes
from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.memory import mixed_precision
from motet.cost.operations import Operations

Balancing = Callable[[Plan], StepCosts]
"""By what training balances a Plan's colocated phases."""


def by_operations(plan: Plan) -> StepCosts:
    """As training does where its recipe says nothing."""
    element_bytes = mixed_precision(plan.precision, pipeline=False).compute
    speed = ASSUMED_SPEEDS[device_type_of(plan)]
    return operation_costs(plan.model, recomputed_blocks(plan), speed, element_bytes, replicas_per_node(plan))


def operation_costs(
    model: ModelSpec,
    recompute: Mapping[str, int],
    speed: Speed,
    element_bytes: int,
    ranks_per_node: int | None = None,
) -> StepCosts:
    """By the model's operations at a speed. recompute: as in `Operations`. element_bytes: of what is exchanged.
    ranks_per_node: of those that exchange; None: all share a node."""
    work = Operations(model, recompute)
    unit_s = dict.fromkeys((module.name for module in model.modules), work.unit_flops / speed.flops_per_s)
    times = StepTimes(
        lambda _: unit_s,
        speed.network(ranks_per_node),
        token_bytes=model.module(BACKBONE).layers[0].output_width * element_bytes,
        frozen=frozenset(module.name for module in model.modules if not module.trainable),
    )
    return StepCosts({module.name: Padded() if module.padded else Packed() for module in model.modules}, work, times)


def recomputed_blocks(plan: Plan) -> Mapping[str, int]:
    """Per module, of how many of its blocks the activations are recomputed, of a Plan whose phases are colocated."""
    (recompute,) = plan.unit_of(BACKBONE).recompute or ({},)
    return recompute


def replicas_per_node(plan: Plan) -> int:
    """Data-parallel ranks in a node: of tensor-parallel ones, one exchanges for all."""
    return max(plan.cluster.ranks_per_node // plan.unit_of(BACKBONE).tp, 1)


def device_type_of(plan: Plan) -> str:
    """As torch calls it, "cpu" or "cuda"."""
    return "cpu" if plan.cluster.device.name == "cpu" else "cuda"
