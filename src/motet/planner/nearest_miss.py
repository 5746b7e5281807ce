"""Where nothing fits: which Plan comes nearest, and what would make it fit.

Everything that is free has been searched by then, so what is left are the pins, each let go by itself, other strategies
than those pinned, and more nodes. Whatever is named has been tried: the strategy proposes a Plan with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, Pins, RuledOut, Strategy
from motet.planner.job import Job

_TIMES = (2, 3, 4, 8)
"""As many nodes, that are tried one after the other."""
_PINS = ("recompute", "microbatch_size", "tp", "pp", "dp", "schedule", "balance")
"""In the order in which they are let go: what costs least to change first."""


def nearest_miss(ruled_out: Sequence[RuledOut]) -> RuledOut | None:
    """What lacks the fewest bytes; where memory is no reason, the first."""
    lacking = [ruled for ruled in ruled_out if ruled.shortfall_bytes > 0]
    return min(lacking, key=lambda ruled: ruled.shortfall_bytes) if lacking else next(iter(ruled_out), None)


def would_fit(job: Job, strategies: Mapping[str, Strategy], pins: Pins, nearest: RuledOut) -> tuple[str, ...]:
    """Phrases such as "recomputation of 4 layers", "TP 4", "2 nodes". Each takes as long as its strategy proposes."""
    own = strategies.get(nearest.strategy)
    others = [name for name in pins.strategies and strategies if name not in pins.strategies]
    found = list(nearest.mends)
    if own is not None:
        found += _without_a_pin(job, own, pins)
    unpinned = Pins(strategies=pins.strategies)
    if own is not None and not found and pins != unpinned and (free := _proposed(own, job, unpinned)):
        found.append(f"other degrees than those pinned ({free.what})")
    if not found:
        other = next((name for name in others if _proposed(strategies[name], job, pins)), None)
        found += [f"strategy {other!r}"] if other else []
    if own is not None and nearest.shortfall_bytes:
        found += _on_more_nodes(job, own, pins)
    return tuple(dict.fromkeys(found))


def _without_a_pin(job: Job, strategy: Strategy, pins: Pins) -> Iterator[str]:
    for name in _PINS:
        free: dict[str, Any] = {name: None}
        if getattr(pins, name) is not None and (one := _proposed(strategy, job, replace(pins, **free))):
            yield _words(name, one.plan)


def _words(name: str, plan: Plan) -> str:
    """What a Plan has where a pin was."""
    if name == "recompute":
        count = sum(sum(stage.values()) for unit in plan.units for stage in unit.recompute)
        return f"recomputation of {count:,} layer{'' if count == 1 else 's'}"
    if name == "microbatch_size":
        return f"microbatches of {plan.microbatch_size}"
    if name in ("tp", "pp", "dp"):
        return f"{name.upper()} {getattr(plan.unit_of(BACKBONE), name)}"
    return f"{name} {getattr(plan, name)!r}"


def _on_more_nodes(job: Job, strategy: Strategy, pins: Pins) -> Iterator[str]:
    for times in _TIMES:
        cluster = replace(job.cluster, num_nodes=times * job.cluster.num_nodes)
        larger = replace(job, cluster=cluster, cost=job.cost.on(cluster))
        if _proposed(strategy, larger, pins):
            yield f"{cluster.num_nodes:,} nodes"
            return


def _proposed(strategy: Strategy, job: Job, pins: Pins) -> Candidate | None:
    """The one with the best estimate."""
    try:
        return next((one for one in strategy(job, pins) if isinstance(one, Candidate)), None)
    except UserError:  # of a profile that lacks what the strategy asks for
        return None
