"""Strategy: encoders, backbone and generators on ranks of their own (MMScale sections 4.1 to 4.3).

1. Ranks are allocated exactly (`allocate.py`), for every TP and microbatch size of the backbone, from estimates of
   bytes and of how much is recomputed.
2. The units of each allocation are cut into stages that recompute the least with which they fit (`unit_stages.py`), and
   time and bytes are counted again.
3. The best of them also interleave chunks of the backbone (`interleaved_units.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from motet.core.words import counted_words, shown_seconds, size_words
from motet.core.workload import BACKBONE
from motet.planner.candidate import DISAGGREGATED, Candidate, Pins, RuledOut
from motet.planner.disaggregated.allocate import allocate, rigid
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.interleaved_units import interleaved_units
from motet.planner.disaggregated.placed_units import PlacedUnits, side_of
from motet.planner.disaggregated.unit_options import RECOMPUTED_SHARES, microbatch_sizes, unit_options
from motet.planner.infeasible import indivisible, not_apart
from motet.planner.job import Job
from motet.planner.module_pins import backbone_pins

_MAX_MICROBATCH_SIZE = 16
"""Examples of the backbone's largest microbatch: larger ones fill a pipeline worse and hold more."""
_NUM_PROPOSED, _NUM_INTERLEAVED = 6, 2
"""So many allocations are proposed, and so many are tried with chunks of the backbone."""
_NUM_TRIES = 3
"""So often are ranks allocated again with less memory, if stages turn out to lack some."""

Allocate = Callable[[Sequence[UnitOptions], Limits], Allocation | None]
"""A function that gives each unit ranks, within limits; None if nothing fits."""


def propose_disaggregated(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """Each module on ranks of its own, in 1F1B across units or with the backbone's chunks interleaved: the best by
    estimate, and those that lack memory."""
    pins = backbone_pins(pins)
    why = not_apart(job, pins, interleaved=True) or indivisible(
        job, pins, len(job.model.module(BACKBONE).blocks), modules=(BACKBONE,)
    )
    if why:
        yield RuledOut(DISAGGREGATED, "", why)
        return
    # 1. Allocations, and the best one that gives all units the backbone's TP and DP, to compare with.
    units = options(job, pins)
    rigid_one = fastest_allocated(job, pins, units, rigid)
    allocated = [*_placed(job, pins, units), *([rigid_one] if rigid_one else [])]
    placed = list({one.what: one for one in allocated}.values())
    if not placed:
        names = ", ".join(unit.name for unit in units)
        why = (
            f"{counted_words(job.cluster.num_ranks, 'rank is', 'ranks are')} too few for units of {names}, with a "
            f"batch of {job.batch_size}."
        )
        yield RuledOut(DISAGGREGATED, "", why)
    baseline = None if rigid_one is None or rigid_one.shortfall_bytes else rigid_one
    # 2. The best of those that fit, in 1F1B and interleaved.
    fitting = sorted((one for one in placed if not one.shortfall_bytes), key=lambda one: one.estimate_s)
    plain = [_candidate(one, baseline) for one in fitting[:_NUM_PROPOSED]]
    interleaved = [_interleaved(one, baseline, pins) for one in fitting[:_NUM_INTERLEAVED]]
    candidates = [*plain, *(one for one in interleaved if one)]
    allowed = [one for one in candidates if pins.allow(schedule=one.plan.schedule)]
    if fitting and not allowed:
        why = "the backbone has one stage, or too few layers, or no memory for what interleaved chunks hold."
        yield RuledOut(DISAGGREGATED, f"{fitting[0].what}; interleaved", why)
    yield from sorted(allowed, key=lambda one: one.estimate_s)[:_NUM_PROPOSED]
    yield from (_ruled_out(one, pins) for one in placed if one.shortfall_bytes)


def fastest_allocated(job: Job, pins: Pins, units: Sequence[UnitOptions], allocate: Allocate) -> PlacedUnits | None:
    """The fastest of the allocations that `allocate` makes, one for each microbatch size of the backbone; None if none
    fits.

    units: `options(job, pins)`.
    """
    backbone = next(unit for unit in units if unit.side == 0)
    sizes = sorted(set(backbone.num_examples.tolist()))
    allocations = [allocate(*_pinned(job, pins, units, size)) for size in sizes]
    fastest = min((one for one in allocations if one), key=lambda one: one.time_s, default=None)
    return PlacedUnits(job, fastest, pins.recompute or "least") if fastest else None


def _candidate(one: PlacedUnits, baseline: PlacedUnits | None) -> Candidate:
    return Candidate(
        DISAGGREGATED,
        one.what,
        one.plan,
        one.estimate_s,
        one.bound_s,
        lambda: (_ranks_fact(one, baseline), _slowest_fact(one)),
    )


def _interleaved(one: PlacedUnits, baseline: PlacedUnits | None, pins: Pins) -> Candidate | None:
    """The same allocation with the backbone in the number of chunks that is estimated best, if any fits."""
    fitting = [each for each in interleaved_units(one, pins.recompute or "least") if not each.shortfall_bytes]
    if not fitting:
        return None
    best = min(fitting, key=lambda each: each.estimate_s)
    gain = one.estimate_s / best.estimate_s
    fact = f"With {best.num_chunks} chunks a rank of the backbone, {gain:.2f} times as fast as with one, by estimate."
    return Candidate(
        DISAGGREGATED, best.what, best.plan, best.estimate_s, best.bound_s, lambda: (_ranks_fact(one, baseline), fact)
    )


def options(job: Job, pins: Pins) -> list[UnitOptions]:
    """The ways to run each module, in the order of the model; as pinned."""
    shares = RECOMPUTED_SHARES[pins.recompute or "least"]
    units = []
    for module in job.model.modules:
        if module.name == BACKBONE:
            sizes = (pins.microbatch_size,) if pins.microbatch_size else _backbone_sizes(job)
            unit = unit_options(job, BACKBONE, side_of(job.model, BACKBONE), sizes, shares, pins.pp)
            units.append(unit.take(unit.tp == pins.tp) if pins.tp else unit)
        else:
            side = side_of(job.model, module.name)
            pinned = pins.of(module.name)
            unit = unit_options(job, module.name, side, microbatch_sizes(job), shares, pinned.pp)
            units.append(unit.take(unit.tp == pinned.tp) if pinned.tp else unit)
    return units


def _backbone_sizes(job: Job) -> tuple[int, ...]:
    return microbatch_sizes(job, _MAX_MICROBATCH_SIZE, apart=2)


def _placed(job: Job, pins: Pins, units: Sequence[UnitOptions]) -> Iterator[PlacedUnits]:
    """The fastest allocation for each TP and microbatch size of the backbone. If by estimate none of a TP fits memory,
    the fastest with the smallest microbatch, whatever it lacks."""
    backbone = next(unit for unit in units if unit.side == 0)
    sizes = sorted(set(backbone.num_examples.tolist()))
    for tp in sorted(set(backbone.tp.tolist())):
        placed = [one for size in sizes for one in _fitting(job, pins, *_pinned(job, pins, units, size, tp))]
        if not placed:
            alike, limits = _pinned(job, pins, units, sizes[0], tp)
            fastest = allocate(alike, replace(limits, capacity_bytes=np.inf))
            placed = [PlacedUnits(job, fastest, pins.recompute or "least")] if fastest else []
        yield from placed


def _fitting(job: Job, pins: Pins, units: Sequence[UnitOptions], limits: Limits) -> Iterator[PlacedUnits]:
    """The fastest allocation, or none. Its bytes are estimates; if its stages lack memory, ranks are allocated again
    with so much less."""
    placed = None
    for _ in range(_NUM_TRIES):
        allocation = allocate(units, limits)
        if allocation is None:
            break
        placed = PlacedUnits(job, allocation, pins.recompute or "least")
        if not placed.shortfall_bytes:
            break
        limits = replace(limits, capacity_bytes=limits.capacity_bytes - placed.shortfall_bytes)
    if placed is not None:
        yield placed


def _pinned(
    job: Job, pins: Pins, units: Sequence[UnitOptions], size: int, tp: int | None = None
) -> tuple[list[UnitOptions], Limits]:
    """The units, the backbone's rows only for one microbatch size and, unless it is None, one TP; DP is as pinned."""
    limits = Limits(
        job.cluster.num_ranks,
        job.batch_size,
        job.capacity_bytes,
        global_microbatch_size=(pins.dp or 0) * size,
        replicas={name: stated.dp for name, stated in pins.modules.items() if stated.dp is not None},
    )
    rows = [(unit.num_examples == size) & ((unit.tp == tp) | (tp is None)) | (unit.side != 0) for unit in units]
    return [unit if unit.side else unit.take(row) for unit, row in zip(units, rows)], limits


def _ranks_fact(placed: PlacedUnits, baseline: PlacedUnits | None) -> str:
    """What each unit got, compared with the best rigid allocation."""
    if baseline is placed:
        return f"Ranks: {_ranks(placed)}; the backbone's TP and DP for all modules are as good as any."
    if baseline is None:
        return f"Ranks: {_ranks(placed)}; with the backbone's TP and DP for all modules, none fits."
    ratio = baseline.estimate_s / placed.estimate_s
    return (
        f"Ranks: {_ranks(placed)}; predicted {ratio:.2f} times as fast as with the backbone's TP and DP for all "
        f"modules ({baseline.what}): {_ranks(baseline)}."
    )


def _ranks(placed: PlacedUnits) -> str:
    return ", ".join(f"{name} {cut.share.num_ranks:,}" for name, cut in placed.cuts.items())


def _slowest_fact(placed: PlacedUnits) -> str:
    each = ", ".join(f"{name} {shown_seconds(cut.slowest_s)}" for name, cut in placed.cuts.items())
    return f"Slowest stage of each unit, forward and backward of a microbatch: {each}."


def _ruled_out(placed: PlacedUnits, pins: Pins) -> RuledOut:
    cut = max(placed.cuts.values(), key=lambda cut: cut.shortfall_bytes)
    stage = max(range(len(cut.fits)), key=lambda number: cut.fits[number].shortfall_bytes)
    lacks, share = cut.shortfall_bytes, cut.share
    done = "with nothing recomputed" if pins.recompute == "none" else "with all layers recomputed"
    why = f"stage {stage} of {share.name} lacks {size_words(lacks)} {done}."
    return RuledOut(DISAGGREGATED, placed.what, why, lacks)
