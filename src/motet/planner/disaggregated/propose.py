"""Strategy: encoders, backbone and generators on ranks of their own (MMScale sections 4.1 to 4.3).

Ranks are allocated exactly (`allocate.py`), for every TP and microbatch size of the backbone apart, from estimates of
bytes and of how much is recomputed. The units of each allocation are then cut into stages that recompute the least that
fits memory (`unit_stages.py`), and time and bytes are counted again, which MMScale's rounding leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from motet.core.workload import BACKBONE
from motet.planner.candidate import DISAGGREGATED, Candidate, Pins, RuledOut, size_words
from motet.planner.disaggregated.allocate import allocate, rigid
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.interleaved_units import virtual_units
from motet.planner.disaggregated.placed_units import PlacedUnits, side_of
from motet.planner.disaggregated.unit_options import RECOMPUTED, microbatch_sizes, unit_options
from motet.planner.infeasible import indivisible, not_apart
from motet.planner.job import Job
from motet.simulate.show.drawing import shown_seconds

_MAX_MICROBATCH = 16
"""Of the backbone: larger ones fill a pipeline worse and hold more."""
_NUM_PROPOSED, _NUM_CHUNKED = 6, 2
"""That are proposed in 1F1B, and that are tried with chunks of the backbone."""
_NUM_TRIES = 3

Allocate = Callable[[Sequence[UnitOptions], Limits], Allocation | None]
"""Gives each unit ranks, within limits."""


def propose_disaggregated(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """Each module on ranks of its own, 1F1B across units, the backbone's chunks interleaved or not: the best by
    estimate, and what is fast and lacks memory."""
    why = not_apart(job, pins, interleaved=True) or indivisible(job, pins, len(job.model.module(BACKBONE).blocks))
    if why:
        yield RuledOut(DISAGGREGATED, "", why)
        return
    units = options(job, pins)
    stiff = fastest_allocated(job, pins, units, rigid)
    placed = list({one.what: one for one in (*_placed(job, pins, units), *([stiff] if stiff else []))}.values())
    if not placed:
        names = ", ".join(unit.name for unit in units)
        why = f"{job.cluster.num_ranks} ranks are too few for units of {names}, with a batch of {job.batch_size}."
        yield RuledOut(DISAGGREGATED, "", why)
    baseline = None if stiff is None or stiff.shortfall_bytes else stiff
    fitting = sorted((one for one in placed if not one.shortfall_bytes), key=lambda one: one.estimate_s)
    plain = [_candidate(one, baseline) for one in fitting[:_NUM_PROPOSED]]
    chunked = [_interleaved(one, baseline, pins) for one in fitting[:_NUM_CHUNKED]]
    found = [*plain, *(one for one in chunked if one)]
    allowed = [one for one in found if pins.allow(schedule=one.plan.schedule)]
    if fitting and not allowed:
        why = "the backbone has one stage, or too few layers, or no memory for what interleaved chunks hold."
        yield RuledOut(DISAGGREGATED, f"{fitting[0].what}; interleaved", why)
    yield from sorted(allowed, key=lambda one: one.estimate_s)[:_NUM_PROPOSED]
    yield from (_ruled_out(one, pins) for one in placed if one.shortfall_bytes)


def fastest_allocated(job: Job, pins: Pins, units: Sequence[UnitOptions], allocate: Allocate) -> PlacedUnits | None:
    """The fastest units, over all microbatch sizes of the backbone, of those that `allocate` gives ranks; None if none
    fits.

    units: `options(job, pins)`.
    """
    backbone = next(unit for unit in units if unit.side == 0)
    sizes = sorted(set(backbone.num_examples.tolist()))
    found = [allocate(*_pinned(job, pins, units, size)) for size in sizes]
    fastest = min((one for one in found if one), key=lambda one: one.time_s, default=None)
    return PlacedUnits(job, fastest, pins.recompute or "least") if fastest else None


def _candidate(one: PlacedUnits, baseline: PlacedUnits | None) -> Candidate:
    facts = (_ranks_fact(one, baseline), _slowest_fact(one))
    return Candidate(DISAGGREGATED, one.what, one.plan, one.estimate_s, one.bound_s, facts)


def _interleaved(one: PlacedUnits, baseline: PlacedUnits | None, pins: Pins) -> Candidate | None:
    """The same allocation with the backbone in the number of chunks that is estimated best, if any fits."""
    fitting = [own for own in virtual_units(one, pins.recompute or "least") if not own.shortfall_bytes]
    if not fitting:
        return None
    best = min(fitting, key=lambda own: own.estimate_s)
    gain = one.estimate_s / best.estimate_s
    fact = f"With {best.num_chunks} chunks a rank of the backbone, {gain:.2f} times as fast as with one, by estimate."
    return Candidate(
        DISAGGREGATED, best.what, best.plan, best.estimate_s, best.bound_s, (_ranks_fact(one, baseline), fact)
    )


def options(job: Job, pins: Pins) -> list[UnitOptions]:
    """The ways to run each module, in the order of the data; the backbone's as pinned."""
    shares = RECOMPUTED[pins.recompute or "least"]
    found = []
    for module in job.model.modules:
        own = module.name == BACKBONE
        sizes = microbatch_sizes(job, _MAX_MICROBATCH, apart=2) if own else microbatch_sizes(job)
        if own and pins.microbatch_size:
            sizes = (pins.microbatch_size,)
        unit = unit_options(job, module.name, side_of(job.model, module.name), sizes, shares, pins.pp if own else None)
        found.append(unit.take(unit.tp == pins.tp) if own and pins.tp else unit)
    return found


def _placed(job: Job, pins: Pins, units: Sequence[UnitOptions]) -> Iterator[PlacedUnits]:
    """The fastest for each TP and microbatch size of the backbone; where memory by estimate allows none of a TP, the
    fastest with the smallest microbatch, whatever it lacks."""
    backbone = next(unit for unit in units if unit.side == 0)
    sizes = sorted(set(backbone.num_examples.tolist()))
    for tp in sorted(set(backbone.tp.tolist())):
        found = [one for size in sizes for one in _fitting(job, pins, *_pinned(job, pins, units, size, tp))]
        if not found:
            alike, limits = _pinned(job, pins, units, sizes[0], tp)
            fastest = allocate(alike, replace(limits, capacity_bytes=np.inf))
            found = [PlacedUnits(job, fastest, pins.recompute or "least")] if fastest else []
        yield from found


def _fitting(job: Job, pins: Pins, units: Sequence[UnitOptions], limits: Limits) -> Iterator[PlacedUnits]:
    """The fastest allocation; as bytes are estimated there, again with less memory if its stages lack some."""
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
    """The units with microbatches of one size, and one TP, of the backbone; DP as pinned."""
    limits = Limits(job.cluster.num_ranks, job.batch_size, job.capacity_bytes, num_taken=(pins.dp or 0) * size)
    rows = [(unit.num_examples == size) & ((unit.tp == tp) | (tp is None)) | (unit.side != 0) for unit in units]
    return [unit if unit.side else unit.take(row) for unit, row in zip(units, rows)], limits


def _ranks_fact(placed: PlacedUnits, stiff: PlacedUnits | None) -> str:
    """What each unit got, against the best rigid allocation."""
    if stiff is placed:
        return f"Ranks: {_ranks(placed)}; the backbone's TP and DP for all modules are as good as any."
    if stiff is None:
        return f"Ranks: {_ranks(placed)}; with the backbone's TP and DP for all modules, none fits."
    ratio = stiff.estimate_s / placed.estimate_s
    return (
        f"Ranks: {_ranks(placed)}; predicted {ratio:.2f} times as fast as with the backbone's TP and DP for all "
        f"modules ({stiff.what}): {_ranks(stiff)}."
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
