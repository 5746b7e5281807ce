"""Seconds in which ranks give rows to each other at a stage, beside the exchanges inside its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet.assign.rows import num_given_rows
from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.memory import StageLayer
from motet.schedule import PlannedStage
from motet.schedule.plan_units import gathering_ranks
from motet.simulate.predict.exchange_seconds import evenly_moved_s, gathers_s
from motet.simulate.predict.merge_prices import merge_seconds

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def given_seconds(pricing: Pricing, stage: PlannedStage) -> tuple[Float64Array, Float64Array]:
    """Seconds in which ranks give rows to each other at a stage, in forward and in backward: those that share
    sequences the rows of encoders, before blocks that take them in, and what generators are given, behind the last;
    those that share items of encoders in bubbles what they made; and those that share products of encoders their parts
    of rows. Rows are taken to lie evenly on the ranks, but those that move for a merge of the user's own
    (`merge_prices.py`).
    """
    forward = backward = pricing.none(stage)
    unit, model = stage.unit, pricing.plan.model
    if BACKBONE in stage.layers and (unit.cp > 1 or pricing.assignment.modules[BACKBONE].cuts is not None):
        merges, colocated = model.merges and stage.layers[BACKBONE][0] == 0, pricing.plan.schedule == "data_parallel"
        # Of colocated phases the exchange takes rows to their places, or to the rank that merges.
        times = {} if colocated else {name: _times(model, stage, name) for name in model.sources(BACKBONE)}
        for name, seconds in merge_seconds(pricing).items() if merges else ():
            if colocated and name != BACKBONE:
                continue
            forward = forward + seconds
            backward = backward + seconds * (name == BACKBONE or model.moved(name)[1])
        is_last = stage.layers[BACKBONE][1] == model.num_blocks[BACKBONE]
        times |= dict.fromkeys(model.generators, (int(is_last), 0))
        for name in (name for name, numbers in times.items() if any(numbers)):
            rows, width = num_given_rows(pricing.assignment, name, None), model.moved(name)[0].output_width
            once, (number, again) = evenly_moved_s(pricing, rows, width * pricing.precision.compute), times[name]
            forward = forward + number * once
            backward = backward + (number * model.moved(name)[1] + again) * once
    if gathering_ranks(pricing.plan, unit) > 1 and stage.index == len(unit.stages) - 1:
        for name in unit.modules:
            forward = forward + _gathered_s(pricing, name, unit).reshape(forward.shape)
    for name in stage.layers if unit.tp > 1 else ():
        layers = [placed for placed in pricing.layers(stage) if placed.module == name and placed.in_parts]
        # Embedding and output layer of a backbone are priced with two gathers more than they take.
        if layers and name != BACKBONE:
            forward = forward + _parts_together_s(pricing, layers[-1], unit).reshape(forward.shape)
            if layers[0].needs_input:
                backward = backward + _parts_together_s(pricing, layers[0], unit).reshape(backward.shape)
    return forward, backward


def _times(model: ModelSpec, stage: PlannedStage, name: str) -> tuple[int, int]:
    """How often a stage moves the rows of an encoder to their places in forward, and how often in recomputation.

    Before the first block, but where a merge of the user's own has taken them there, and once for all later blocks that
    are recomputed, and once for all that are not (`runtime/sections.py`).
    """
    first, stop = stage.layers[BACKBONE]
    entries, recomputed = model.entries(name, BACKBONE), first + stage.recomputed.get(BACKBONE, 0)
    later = {block < recomputed for block in entries if max(first, 1) <= block < stop}
    return int(first == 0 and 0 in entries and not model.merges) + len(later), int(True in later)


def _parts_together_s(pricing: Pricing, placed: StageLayer, unit: Unit) -> Float64Array:
    """Seconds in which all of a unit's tensor-parallel ranks get the rows, or gradients of rows, of which each has a
    part at a layer; by replica and microbatch.
    """
    row_bytes = placed.layer.output_width * pricing.precision.compute
    rows = pricing.layer_pricing.price(placed.module, placed.layer).work.rows
    return gathers_s(pricing.cost, rows * row_bytes, pricing.plan.cluster.unlike(unit.ranks, unit.tp))


def _gathered_s(pricing: Pricing, name: str, unit: Unit) -> Float64Array:
    """Seconds in which the rows of an encoder in bubbles come together, by replica and microbatch.

    Ranks give as many rows as the one with the most of them (`dispatch/gathered_rows.py`). Gradients do not move.
    """
    layer, _ = pricing.plan.model.moved(name)
    num_ranks = gathering_ranks(pricing.plan, unit)
    groups = pricing.plan.cluster.unlike(unit.ranks, num_ranks, apart=unit.tp)
    rows = pricing.layer_pricing.price(name, layer).work.rows
    return gathers_s(pricing.cost, rows * num_ranks * layer.output_width * pricing.precision.compute, groups)
