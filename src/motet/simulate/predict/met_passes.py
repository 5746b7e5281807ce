"""Which passes of a step replicas run together: those of microbatches whose sequences or items they share, and those
of layers whose experts they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from motet.core.arrays import Float64Array
from motet.cost.memory import StageLayer
from motet.schedule import PlannedStage
from motet.schedule.coordinates import replicas_of
from motet.schedule.program import Kind
from motet.simulate.engine.meetings import MetPasses
from motet.simulate.predict.stage_pricing import Pricing, StagePrices

_FORWARD = (Kind.F, Kind.R)


def met_passes(pricing: Pricing, islands: Sequence[int]) -> MetPasses | None:
    """The passes in which replicas wait for each other, in any island; None if there is none.

    They are passes of a stage with a module of which replicas share sequences, or items, in the microbatch: all
    replicas exchange rows in its layers with attention, also those that have none. Other microbatches have no exchange.
    Where replicas share experts, those that do exchange rows in each layer with experts, in every microbatch. From the
    first of these layers to the last one they are run together; what stands before and behind, such as an encoder that
    has whole items, a replica runs by itself.
    """
    assignment, stages = pricing.assignment, pricing.planned.stages
    shared = {
        name: frozenset(items.microbatch[items.cuts.items].tolist())
        for name, items in assignment.modules.items()
        if items.cuts is not None
    }
    experts = any(unit.expert_replicas > 1 for unit in pricing.plan.units)
    if not (shared or experts) or pricing.plan.schedule == "data_parallel":
        return None
    shape = len(islands), len(stages), assignment.num_microbatches
    number, numbers = np.full(shape, -1, dtype=np.int64), dict[tuple[str, int], int]()
    num_groups = 1 + max(unit.dp for unit in pricing.plan.units)
    own = {kind: (np.zeros(shape), np.zeros(shape)) for kind in (*_FORWARD, Kind.B, Kind.I)}
    for index, stage in enumerate(stages):
        of_stage = num_groups * numbers.setdefault((stage.unit.name, stage.index), len(numbers))
        layers, replicas = pricing.layers(stage), replicas_of(pricing.layout, stage, islands)
        num_sharing, names = stage.unit.expert_replicas, {name for name in stage.layers if name in shared}
        with_experts = [i for i, one in enumerate(layers) if one.layer.num_experts and num_sharing > 1]
        for met, microbatches in _by_names({name: shared[name] for name in names}, shape[2]).items():
            at_cut = [i for i, one in enumerate(layers) if one.module in met and one.layer.attention is not None]
            if not (at := sorted({*at_cut, *with_experts})):
                continue
            # The first number is that of all replicas; groups of those that share experts have the others.
            group = 0 * replicas if at_cut else 1 + replicas // num_sharing
            number[:, index, microbatches] = of_stage + group[:, None]
            for kind, sides in _own_shares(pricing, stage, layers[: at[0]], layers[at[-1] + 1 :]).items():
                for table, share in zip(own[kind], sides, strict=True):
                    table[:, index, microbatches] = share[replicas[:, None], microbatches]
    return MetPasses(number, own) if (number >= 0).any() else None


def _by_names(shared: dict[str, frozenset[int]], num_microbatches: int) -> dict[frozenset[str], list[int]]:
    """The microbatches by the modules of which replicas share something in them."""
    found: dict[frozenset[str], list[int]] = {}
    for microbatch in range(num_microbatches):
        met = frozenset(name for name, microbatches in shared.items() if microbatch in microbatches)
        found.setdefault(met, []).append(microbatch)
    return found


def _own_shares(
    pricing: Pricing, stage: PlannedStage, before: Sequence[StageLayer], behind: Sequence[StageLayer]
) -> dict[Kind, tuple[Float64Array, Float64Array]]:
    """By kind, the shares of a pass that layers before and behind those that meet take, [num_replicas,
    num_microbatches] each. Backward runs through the layers the other way round.
    """
    every, *sides = (pricing.of_layers(stage, layers) for layers in (pricing.layers(stage), before, behind))
    found = {}
    for kind in (*_FORWARD, Kind.B, Kind.I):
        total = _pass_s(kind, every)
        shares = [_pass_s(kind, side) / np.where(total > 0, total, 1.0) for side in sides]
        found[kind] = (shares[0], shares[1]) if kind in _FORWARD else (shares[1], shares[0])
    return found


def _pass_s(kind: Kind, prices: StagePrices) -> Float64Array:
    """Seconds of a pass, without recomputation in backward."""
    terms: dict[Kind, Iterable[Float64Array]] = {
        Kind.F: (prices.forward, prices.forward_tensor),
        Kind.R: (prices.recompute,),
        Kind.B: (prices.input, prices.weight, prices.backward_tensor),
        Kind.I: (prices.input, prices.backward_tensor),
    }
    seconds: Float64Array = np.sum([*terms[kind]], axis=0)
    return seconds
