"""Random fills of a Plan's bubbles: whatever `fill_bubbles` accepts."""

from dataclasses import replace

import numpy as np

from motet.core.plan import Fill, Plan
from motet.core.workload import BACKBONE
from motet.schedule import (
    EncoderPipeline,
    Kind,
    Program,
    coarse_fills,
    fill_bubbles,
    fillable,
    parse_action,
    pieces_of,
    planned,
)
from motet.schedule.dependencies import Dependencies
from motet.schedule.layout import parts_with_sums
from motet.schedule.plan_units import units_in_bubbles


def with_random_fills(plan: Plan, seed: int) -> Plan:
    """The Plan with its encoders' passes whole, in blocks or in halves, in any order that can run.

    Where ranks share the backbone's products, half of the Plans have fills inside its passes; where they share an
    encoder's, two fifths of its stages have their sums apart. Itself without bubbles.
    """
    if not units_in_bubbles(plan):
        return plan
    rng = np.random.default_rng((seed, 3))
    can_be_inside = plan.unit_of(BACKBONE).tp > 1 and plan.cluster.tensor_pieces == 1 and plan.filling == "static"
    is_inside = can_be_inside and np.random.default_rng((seed, 5)).random() < 0.5
    draws = rng, np.random.default_rng((seed, 4)), np.random.default_rng((seed, 6))
    program, encoders, fills = _in_parts(plan, *draws, is_inside)
    filled = fill_bubbles(program, encoders, fills)
    needs, done, placed = Dependencies(filled), set(), []
    rows = [list(row) for row in program.actions]
    waiting = [parse_action(fill.action) for fill in fills]
    while waiting or any(rows):
        ready = [row[0] for row in rows if row] + waiting
        ready = [action for action in ready if done.issuperset(needs.of(action))]
        action = ready[rng.integers(len(ready))]
        done.add(action)
        rank = filled.stages[action.stage].rank
        if action in waiting:
            waiting.remove(action)
            placed.append(Fill(rank, str(action), str(rows[rank][0]) if rows[rank] else ""))
        else:
            rows[rank].pop(0)
    return replace(plan, fills=tuple(placed))


def _in_parts(
    plan: Plan,
    rng: np.random.Generator,
    in_halves: np.random.Generator,
    with_sums: np.random.Generator,
    is_inside: bool,
) -> tuple[Program, tuple[EncoderPipeline, ...], list[Fill]]:
    """The backbone's Program, the encoder pipelines, and fills of their passes, whole or in parts of blocks."""
    unfilled, encoders = fillable(plan, split=is_inside)
    stages, fills = planned(plan).stages, []
    num_parts = [int(rng.integers(1, stage.num_layers + 1)) for stage in stages]
    for number, stage in enumerate(stages):
        if in_halves.random() < 0.4 and (num_pieces := len(pieces_of(stage, plan.model))) > stage.num_layers:
            num_parts[number] = int(in_halves.integers(stage.num_layers + 1, num_pieces + 1))
        if with_sums.random() < 0.4 and plan.cluster.tensor_pieces == 1 and stage.unit in units_in_bubbles(plan):
            num_parts[number] = parts_with_sums(stage, plan.model) or num_parts[number]
    is_whole = {(number, kind): rng.random() < 0.2 for number in range(len(stages)) for kind in (Kind.F, Kind.B)}
    for fill in coarse_fills(unfilled.program, encoders):
        action = parse_action(fill.action)
        num = 1 if is_whole[action.stage, action.kind] else num_parts[action.stage]
        fills += [replace(fill, action=str(action._replace(part=part if num > 1 else -1))) for part in range(num)]
    return unfilled.program, encoders, fills
