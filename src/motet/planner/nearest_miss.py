"""Where nothing fits: the Plan that comes nearest, and the changes that would make it fit.

The search has tried all that is not pinned. So what can change are the batch, where it does not divide; the pins, one
at a time or all; the strategies beside the pinned ones; and the number of nodes. Each change that is named was tried:
the strategy proposes a Plan with it, which fits in simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Pins, RuledOut, Strategy, prediction_that_fits
from motet.planner.field_pins import proposals_for
from motet.planner.job import Job
from motet.planner.step_bound import step_bound
from motet.simulate.predict.beyond_profile import guesses

_FEW_NODES = 16
_NODE_FACTORS = (1.25, 1.5, 2, 3, 4, 8)
"""Every number of nodes up to _FEW_NODES is tried, and these multiples of the job's."""
_PINS = ("recompute", "microbatch_size", "tp", "pp", "dp", "schedule", "balance")
"""Pins in the order in which they are released: what costs a user least comes first."""
_MAX_TRIED = 3
"""So many candidates of a strategy are simulated, to see whether one fits."""


def nearest_miss(ruled_out: Sequence[RuledOut]) -> RuledOut | None:
    """The first that nearly fits, else the one that lacks the fewest bytes; where memory is never the
    reason, the first that is a Plan, else the first.

    A Plan that a profile is too small to predict is nearer than a strategy that has none.
    """
    if (near := next((ruled for ruled in ruled_out if ruled.nearly_fits), None)) is not None:
        return near
    lacking = [ruled for ruled in ruled_out if ruled.shortfall_bytes > 0]
    if lacking:
        return min(lacking, key=lambda ruled: ruled.shortfall_bytes)
    return next((ruled for ruled in ruled_out if ruled.what), next(iter(ruled_out), None))


def would_fit(job: Job, strategies: Mapping[str, Strategy], pins: Pins, nearest: RuledOut) -> tuple[str, ...]:
    """Phrases such as "recomputation of 4 layers", "TP 4", "2 nodes". For each, a strategy proposes once; for the
    fewest nodes, all that are allowed propose on each number below it on which state alone would fit.
    """
    strategy = strategies.get(nearest.strategy)
    remedies = list(nearest.remedies)
    # 1. Another batch, and one pin less.
    if strategy is not None:
        sizes = (size for size in nearest.batches if _proposed(strategy, replace(job, batch_size=size), pins))
        remedies += [f"a batch of {size:,}" for size in sizes]
        remedies += _without_a_pin(job, strategy, pins)
    # 2. No pins.
    no_pins = Pins(strategies=pins.strategies)
    if strategy is not None and not remedies and pins != no_pins and (free := _proposed(strategy, job, no_pins)):
        remedies.append(f"other values than those pinned ({free.what})")
    # 3. Another strategy.
    if not remedies:
        others = [name for name in pins.strategies and strategies if name not in pins.strategies]
        other = next((name for name in others if _proposed(strategies[name], job, pins)), None)
        remedies += [f"strategy {other!r}"] if other else []
    # 4. More nodes.
    if strategy is not None and nearest.shortfall_bytes:
        allowed = {name: strategies[name] for name in pins.strategies or strategies if name in strategies}
        remedies += _on_more_nodes(job, {nearest.strategy: strategy, **allowed}, pins)
    return tuple(dict.fromkeys(remedies))


def _without_a_pin(job: Job, strategy: Strategy, pins: Pins) -> Iterator[str]:
    for name in _PINS:
        released: dict[str, Any] = {name: None}
        if getattr(pins, name) is None:
            continue
        if candidate := _proposed(strategy, job, replace(pins, **released)):
            yield _words(name, candidate.plan)


def _words(name: str, plan: Plan) -> str:
    """The value of a pinned field in a Plan without the pin."""
    if name == "recompute":
        count = sum(sum(stage.values()) for unit in plan.units for stage in unit.recompute)
        return f"recomputation of {count:,} layer{'' if count == 1 else 's'}"
    if name == "microbatch_size":
        return f"microbatches of {plan.microbatch_size}"
    if name in ("tp", "pp", "dp"):
        return f"{name.upper()} {getattr(plan.unit_of(BACKBONE), name)}"
    return f"{name} {getattr(plan, name)!r}"


def _on_more_nodes(job: Job, strategies: Mapping[str, Strategy], pins: Pins) -> Iterator[str]:
    """The fewest nodes on which a strategy has a Plan, and by which if it is not the first."""
    first, *_ = strategies
    for num_nodes in _more_nodes(job.cluster.num_nodes):
        larger = job.on(replace(job.cluster, num_nodes=num_nodes))
        if math.isinf(step_bound(larger, cuts=pins.cuts).step_s):
            continue
        name = next((name for name, strategy in strategies.items() if _proposed(strategy, larger, pins)), None)
        if name is not None:
            yield f"{counted_words(num_nodes, 'node')}" + ("" if name == first else f" ({name})")
            return


def _more_nodes(num_nodes: int) -> list[int]:
    """The numbers of nodes above a number that are tried, ascending."""
    multiples = (math.ceil(factor * num_nodes) for factor in _NODE_FACTORS)
    return sorted({number for number in (*range(_FEW_NODES + 1), *multiples) if number > num_nodes})


def _proposed(strategy: Strategy, job: Job, pins: Pins) -> Candidate | None:
    """A candidate with all pins that fits memory in simulation: of the first, which have the least estimates. None if
    there is none.
    """
    try:
        proposals = (each for each in proposals_for(strategy, job, pins) if isinstance(each, Candidate))
        return next((each for each in islice(proposals, _MAX_TRIED) if _fits(job, each)), None)
    except UserError:  # A profile may lack what the strategy needs.
        return None


def _fits(job: Job, candidate: Candidate) -> bool:
    prediction = prediction_that_fits(job, candidate)
    return prediction is not None and not guesses(prediction.beyond)
