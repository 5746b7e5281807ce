"""Where nothing fits: the Plan that comes nearest, and the changes that would make it fit.

The search has tried all that is not pinned. So what can change are the pins, one at a time or all; the strategies
beside the pinned ones; and the number of nodes. Each change that is named was tried: the strategy proposes a Plan with
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Pins, RuledOut, Strategy
from motet.planner.field_pins import before_context, with_pinned_fields
from motet.planner.job import Job

_NODE_FACTORS = (2, 3, 4, 8)
"""Multiples of the job's nodes, in the order in which they are tried."""
_PINS = ("recompute", "microbatch_size", "tp", "pp", "dp", "schedule", "balance")
"""Pins in the order in which they are released: what costs a user least comes first."""


def nearest_miss(ruled_out: Sequence[RuledOut]) -> RuledOut | None:
    """The one that lacks the fewest bytes; where memory is never the reason, the first."""
    lacking = [ruled for ruled in ruled_out if ruled.shortfall_bytes > 0]
    return min(lacking, key=lambda ruled: ruled.shortfall_bytes) if lacking else next(iter(ruled_out), None)


def would_fit(job: Job, strategies: Mapping[str, Strategy], pins: Pins, nearest: RuledOut) -> tuple[str, ...]:
    """Phrases such as "recomputation of 4 layers", "TP 4", "2 nodes". For each, a strategy proposes once."""
    strategy = strategies.get(nearest.strategy)
    remedies = list(nearest.remedies)
    # 1. One pin less.
    if strategy is not None:
        remedies += _without_a_pin(job, strategy, pins)
    # 2. No pins.
    no_pins = Pins(strategies=pins.strategies)
    if strategy is not None and not remedies and pins != no_pins and (free := _proposed(strategy, job, no_pins)):
        remedies.append(f"other degrees than those pinned ({free.what})")
    # 3. Another strategy.
    if not remedies:
        others = [name for name in pins.strategies and strategies if name not in pins.strategies]
        other = next((name for name in others if _proposed(strategies[name], job, pins)), None)
        remedies += [f"strategy {other!r}"] if other else []
    # 4. More nodes.
    if strategy is not None and nearest.shortfall_bytes:
        remedies += _on_more_nodes(job, strategy, pins)
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


def _on_more_nodes(job: Job, strategy: Strategy, pins: Pins) -> Iterator[str]:
    for factor in _NODE_FACTORS:
        cluster = replace(job.cluster, num_nodes=factor * job.cluster.num_nodes)
        if _proposed(strategy, job.on(cluster), pins):
            yield f"{cluster.num_nodes:,} nodes"
            return


def _proposed(strategy: Strategy, job: Job, pins: Pins) -> Candidate | None:
    """The candidate with the least estimate; None if there is none."""
    try:
        proposals = (each for each in strategy(job, before_context(pins)) if isinstance(each, Candidate))
        adapted = (with_pinned_fields(each, pins) for each in proposals)
        return next((each for each in adapted if isinstance(each, Candidate)), None)
    except UserError:  # A profile may lack what the strategy needs.
        return None
