"""The units of a Plan by the ranks that they run on: ranks of their own, or those of the backbone's unit."""

from __future__ import annotations

from collections import Counter
from math import gcd

from motet.core.plan import MOVES_COLOCATED, MOVES_ITEMS, Plan, Unit
from motet.core.workload import BACKBONE


def backbone_unit(plan: Plan) -> Unit:
    """The unit that runs the backbone."""
    return plan.unit_of(BACKBONE)


def units_in_bubbles(plan: Plan) -> tuple[Unit, ...]:
    """Encoder units that run on the ranks of the backbone's unit, in its bubbles (Optimus section 3.1)."""
    backbone = backbone_unit(plan)
    return tuple(unit for unit in plan.units if unit is not backbone and unit.first_rank == backbone.first_rank)


def is_wrapped(plan: Plan) -> bool:
    """Whether FSDP wraps the modules of a Plan: under data parallelism, but where each rank has all of a whole copy."""
    unit = backbone_unit(plan)
    shards = (unit.shard_size or unit.dp) if unit.zero else 1
    return plan.schedule == "data_parallel" and max(shards, unit.tp, unit.ep) > 1


def on_backbone_ranks(plan: Plan) -> frozenset[str]:
    """The modules that run on the ranks of the backbone's unit: those of that unit, and those in its bubbles."""
    return frozenset(name for unit in (backbone_unit(plan), *units_in_bubbles(plan)) for name in unit.modules)


def pipelined_units(plan: Plan) -> tuple[Unit, ...]:
    """The units that have ranks of their own. The backbone's unit is one of them."""
    in_bubbles = units_in_bubbles(plan)
    return tuple(unit for unit in plan.units if unit not in in_bubbles)


def sharing_ranks(plan: Plan, unit: Unit) -> int:
    """Over how many ranks a replica's items of an encoder are dealt out: its context-parallel ranks.

    In bubbles a rank of the backbone's pipeline stands for as many as have the products of a layer between them, of
    which there may be several groups; tensor-parallel ranks of one count once.
    """
    host = backbone_unit(plan) if unit in units_in_bubbles(plan) else unit
    return host.cp * host.tp // unit.tp


def gathering_ranks(plan: Plan, unit: Unit) -> int:
    """On how many ranks an encoder's rows come together behind it: it runs in bubbles, where several groups of ranks
    deal out its items for one context-parallel rank of the backbone, and all of its ranks need the rows. Else 1.
    """
    return backbone_unit(plan).tp // unit.tp if unit in units_in_bubbles(plan) else 1


def replicas_in_step(plan: Plan, unit: Unit) -> int:
    """How many replicas of a unit, one after the other, take their microbatches together: all, but in bubbles those of
    one pipeline beside each replica of the backbone, as other pipelines take other microbatches.
    """
    return unit.dp * unit.pp // backbone_unit(plan).pp if unit in units_in_bubbles(plan) else unit.dp


def rank_of_stage(plan: Plan, unit: Unit, stage: int) -> int:
    """The pipeline rank that runs a stage of a unit of the Plan. stage: its index in the unit."""
    if plan.schedule == "zb_v" and stage >= unit.pp:
        return 2 * unit.pp - 1 - stage
    return stage % unit.pp


def shares_items(plan: Plan, module: str) -> bool:
    """Whether the replicas of a module's unit may share the items of an example: the unit has ranks of its own beside
    the backbone's, and no other module that feeds this one, or is fed by it.
    """
    if module in on_backbone_ranks(plan):
        return False
    unit = plan.unit_of(module)
    return not any(module in edge and set(edge) <= set(unit.modules) for edge in plan.model.edges)


def moves_items(plan: Plan) -> bool:
    """Whether items may be computed apart from their examples, on the ranks of colocated phases or of other units."""
    return plan.balance in (MOVES_COLOCATED if plan.schedule == "data_parallel" else MOVES_ITEMS)


def joins_all_replicas(plan: Plan) -> bool:
    """Whether any replica of a unit may send to any replica of another: items are balanced over all of a unit's."""
    if plan.balance == "split":
        return any(cuts_over_replicas(plan, module.name) for module in plan.model.modules)
    return plan.balance in MOVES_ITEMS and len(pipelined_units(plan)) > 1


def cuts_sequences(plan: Plan) -> bool:
    """Whether replicas of the backbone may share sequences."""
    return plan.balance == "split" and backbone_unit(plan).dp > 1


def cuts_over_replicas(plan: Plan, module: str) -> bool:
    """Whether replicas of an encoder's unit may share its items: the unit has ranks of its own, and the encoder feeds
    the backbone alone, of which any replica takes in rows from any of them.
    """
    if plan.balance != "split" or not shares_items(plan, module) or plan.unit_of(module).dp == 1:
        return False
    return _feeds_backbone_alone(plan, module) and plan.model.module(module).shareable


def can_share_items(plan: Plan, module: str) -> bool:
    """Whether several ranks may have rows of an item of an encoder, and then meet in its blocks."""
    shares = cuts_beside_sequences(plan, module) or cuts_over_replicas(plan, module)
    return shares or plan.unit_of(module).cp > 1


def cuts_beside_sequences(plan: Plan, module: str) -> bool:
    """Whether replicas share items of an encoder where they share sequences: it is in the backbone's unit and feeds the
    backbone alone, to whose places its rows go from any replica.
    """
    unit = backbone_unit(plan)
    is_here = cuts_sequences(plan) and unit.cp == 1 and module in unit.modules and module not in unit.replicated
    return is_here and _feeds_backbone_alone(plan, module) and plan.model.module(module).shareable


def _feeds_backbone_alone(plan: Plan, module: str) -> bool:
    return {edge for edge in plan.model.edges if module in edge} == {(module, BACKBONE)}


def num_islands(plan: Plan) -> int:
    """Into how many parts with no edge between them the replicas of a pipeline's units fall."""
    return 1 if joins_all_replicas(plan) else gcd(*(unit.dp for unit in pipelined_units(plan)))


def meeting_units(plan: Plan) -> tuple[Unit, ...]:
    """The units whose replicas in an island run each pass together, as they share sequences, items or experts."""
    islands, backbone = num_islands(plan), backbone_unit(plan)
    shares_sequences = cuts_sequences(plan) or backbone.expert_replicas > 1
    return tuple(
        unit
        for unit in pipelined_units(plan)
        if unit.dp > islands
        and ((unit is backbone and shares_sequences) or any(cuts_over_replicas(plan, name) for name in unit.modules))
    )


def collects_in_islands(plan: Plan) -> bool:
    """Whether ranks of one island enter collectives of each microbatch together: several replicas of a unit share out
    gradients or parameters, or the stages of one do those of what they all compute.
    """
    islands, hosted = num_islands(plan), units_in_bubbles(plan)
    is_copied = backbone_unit(plan).dp > islands
    return any(
        unit.zero > 1 and (is_copied if unit in hosted else unit.dp > islands or bool(unit.replicated))
        for unit in plan.units
    )


def recomputed_in(plan: Plan) -> dict[str, int]:
    """The number of blocks of each module that a Plan recomputes, over all stages."""
    counts = Counter[str]()
    for unit in plan.units:
        for recompute in unit.recompute:
            counts.update(recompute)
    return dict(counts)
