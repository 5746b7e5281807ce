"""The costs that balance a Plan's colocated phases: the work and the seconds that training decides from.

A prediction must place items where training will place them, so both use the same weights: operations at the speeds
that a recipe states or training assumes. The cost model knows the devices better, but training does not balance by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from motet.balance import ASSUMED_SPEEDS, Speed, StepCosts, StepTimes
from motet.balance.costs import cost_of
from motet.balance.phases import KeyExchange
from motet.core.errors import UserError
from motet.core.nodes import RanksPerNode
from motet.core.plan import Plan, Policy
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.memory import held_elements, mixed_precision, stage_layers
from motet.cost.operations import Operations

Balancing = Callable[[Plan], StepCosts]
"""A function from a Plan to the costs by which training balances its colocated phases."""


def by_operations(plan: Plan) -> StepCosts:
    """The costs of a recipe that states none: the model's operations at an assumed speed."""
    element_bytes = mixed_precision(plan.precision, pipeline=False).compute
    speed = ASSUMED_SPEEDS[device_type_of(plan)]
    nodes = plan.replicas_by_node
    return operation_costs(plan.model, recomputed_blocks(plan), speed, element_bytes, nodes, policies=plan.policy)


def operation_costs(
    model: ModelSpec,
    recompute: Mapping[str, int],
    speed: Speed,
    element_bytes: int,
    ranks_per_node: RanksPerNode | None = None,
    *,
    policies: Mapping[str, Policy] = MappingProxyType({}),
) -> StepCosts:
    """The costs of a model by its operations at a speed.

    recompute:      as in `Operations`.
    element_bytes:  bytes of an exchanged number.
    ranks_per_node: of the exchanging ranks, as of `Network`.
    policies:       of the phases that are balanced otherwise than they are computed.
    Raises UserError for the policy "padded_attention", of which operations know no parts.
    """
    balanced_as = policies_of(model, policies)
    work = Operations(model, recompute)
    unit_s = dict.fromkeys((module.name for module in model.modules), work.unit_flops / speed.flops_per_s)
    row_bytes = {name: model.moved(name)[0].output_width * element_bytes for name in model.sources(BACKBONE)}
    with_keys = [name for name in row_bytes if 0 not in model.entries(name, BACKBONE)]
    times = StepTimes(
        lambda _: unit_s,
        speed.network(ranks_per_node),
        token_bytes=model.module(BACKBONE).layers[0].output_width * element_bytes,
        row_bytes=row_bytes,
        media_bytes=max((row_bytes[name] for name in with_keys), default=0),
        frozen=frozenset(
            module.name for module in model.modules if module.name != BACKBONE and not model.moved(module.name)[1]
        ),
        held=held_elements(model, recompute),
        keys=key_exchanges(model, recompute, element_bytes),
        merges=model.merges,
        again=tuple(dict.fromkeys(source for source, sink, _ in model.reentries if sink == BACKBONE)),
    )
    return StepCosts({name: cost_of(policy) for name, policy in balanced_as.items()}, work, times)


def cutting(times: StepTimes, model: ModelSpec, recompute: Mapping[str, int], element_bytes: int) -> StepTimes:
    """The same where also items of encoders may be cut over ranks. Others: as of `operation_costs`."""
    shareable = [module for module in model.modules if module.name != BACKBONE and module.shareable]
    return replace(
        times,
        item_keys={
            module.name: () if module.tile_rows else key_exchanges(model, recompute, element_bytes, module.name)
            for module in shareable
        },
        cut_rows={module.name: module.cut_rows for module in shareable},
        tile_rows={module.name: module.tile_rows for module in shareable if module.tile_rows},
    )


def key_exchanges(
    model: ModelSpec, recompute: Mapping[str, int], element_bytes: int, name: str = BACKBONE
) -> tuple[KeyExchange, ...]:
    """What ranks that share items of a module exchange in a microbatch, by kinds of layers.

    Layers that attend to what is beside an item exchange none. Others: as of `operation_costs`.
    """
    counts: Counter[KeyExchange] = Counter()
    for each in stage_layers(model, {name: (0, len(model.module(name).blocks))}, recompute):
        layer, attention = each.layer, each.layer.attention
        if attention is None or attention.keys:
            continue
        divisor, queries = (0, layer.item_rows) if layer.item_rows else (layer.divisor, 0)
        if attention.queries:
            queries = layer.extra_rows
        once = KeyExchange(attention.window, 2 * attention.kv_width * element_bytes, 1, divisor, queries)
        counts[once] += 1 + each.has_backward + each.recomputed
    return tuple(replace(once, count=count) for once, count in counts.items())


def policies_of(model: ModelSpec, stated: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policy by which each module is balanced by operations: the stated one, else as it is computed.

    Raises UserError for the policy "padded_attention", of which operations know no parts.
    """
    if "padded_attention" in stated.values():
        raise UserError(
            'The policy "padded_attention" takes a linear and a quadratic part of lengths, which only a recipe with '
            'balance.cost = "length" states; simulate the recipe.'
        )
    return {**computed_as(model), **stated}


def computed_as(model: ModelSpec) -> dict[str, Policy]:
    """The policy by which each module is computed."""
    return {module.name: "padded" if module.padded else "packed" for module in model.modules}


def recomputed_blocks(plan: Plan) -> Mapping[str, int]:
    """The number of recomputed blocks of each module, for a Plan whose phases are colocated."""
    (recompute,) = plan.unit_of(BACKBONE).recompute or ({},)
    return recompute


def device_type_of(plan: Plan) -> str:
    """torch's name of the Plan's device type: "cpu" or "cuda"."""
    return "cpu" if plan.cluster.device.name == "cpu" else "cuda"
