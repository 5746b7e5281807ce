"""The costs that balance a Plan's colocated phases: the work and the seconds that training decides from.

A prediction must place items where training will place them, so both use the same weights: operations at the speeds
that a recipe states or training assumes. The cost model knows the devices better, but training does not balance by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from motet.balance import ASSUMED_SPEEDS, Packed, Padded, Speed, StepCosts, StepTimes
from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.memory import held_elements, mixed_precision
from motet.cost.operations import Operations

Balancing = Callable[[Plan], StepCosts]
"""A function from a Plan to the costs by which training balances its colocated phases."""


def by_operations(plan: Plan) -> StepCosts:
    """The costs of a recipe that states none: the model's operations at an assumed speed."""
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
    """The costs of a model by its operations at a speed.

    recompute:      as in `Operations`.
    element_bytes:  bytes of an exchanged number.
    ranks_per_node: exchanging ranks in a node; None: all ranks share one node.
    """
    work = Operations(model, recompute)
    unit_s = dict.fromkeys((module.name for module in model.modules), work.unit_flops / speed.flops_per_s)
    times = StepTimes(
        lambda _: unit_s,
        speed.network(ranks_per_node),
        token_bytes=model.module(BACKBONE).layers[0].output_width * element_bytes,
        frozen=frozenset(module.name for module in model.modules if not module.trainable),
        held=held_elements(model, recompute),
    )
    return StepCosts({module.name: Padded() if module.padded else Packed() for module in model.modules}, work, times)


def recomputed_blocks(plan: Plan) -> Mapping[str, int]:
    """The number of recomputed blocks of each module, for a Plan whose phases are colocated."""
    (recompute,) = plan.unit_of(BACKBONE).recompute or ({},)
    return recompute


def replicas_per_node(plan: Plan) -> int:
    """The number of data-parallel replicas in a node. One of a replica's tensor-parallel ranks exchanges for all."""
    return max(plan.cluster.ranks_per_node // plan.unit_of(BACKBONE).tp, 1)


def device_type_of(plan: Plan) -> str:
    """torch's name of the Plan's device type: "cpu" or "cuda"."""
    return "cpu" if plan.cluster.device.name == "cpu" else "cuda"
