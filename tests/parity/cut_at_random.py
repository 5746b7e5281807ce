"""Decisions in which sequences and items are cut anywhere, over any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.cuts import ItemCuts
from motet.core.spec import Module
from motet.core.workload import BatchLengths
from motet.dispatch import Decision


def cut_at_random(
    decision: Decision,
    lengths: BatchLengths,
    rng: np.random.Generator,
    degrees: Sequence[int] | None = None,
    idle: int = 0,
) -> Decision:
    """The decision with sequences shared by ranks, and nothing of the backbone on the last ranks, as many as `idle`.

    degrees: the number of ranks that share each of the first examples; others are whole. None: they are drawn.
    """
    ranks = np.arange(decision.backbone.num_ranks - idle)
    cuts = _drawn(-(-lengths.sequence // 2), ranks, rng, degrees)
    placed = {"backbone": _on_first(decision.backbone, len(ranks), cuts)}
    return replace(decision, assignments=decision.assignments | placed, cuts=cuts)


def cut_items_at_random(
    decision: Decision,
    lengths: BatchLengths,
    module: Module,
    rng: np.random.Generator,
    degrees: Sequence[int] | None = None,
    idle: int = 0,
) -> Decision:
    """As `cut_at_random`, of the items of an encoder."""
    ranks, phase = np.arange(decision.backbone.num_ranks - idle), module.name
    items = lengths.items[phase]
    rows = module.cut_rows.num_rows(items.num_tokens, items.length)
    cuts = _drawn(rows // max(module.tile_rows, 1), ranks, rng, degrees)
    placed = {phase: _on_first(decision.assignments[phase], len(ranks))}
    item_cuts = {} if cuts is None else {phase: cuts}
    cut_rows = {phase: module.cut_rows}
    return replace(decision, assignments=decision.assignments | placed, item_cuts=item_cuts, cut_rows=cut_rows)


def _on_first(placed: Assignment, num_ranks: int, cuts: ItemCuts | None = None) -> Assignment:
    """The assignment with all items on the first ranks, and each that is cut on the one with its largest fragment."""
    ranks = placed.ranks % num_ranks
    for item in cuts.items.tolist() if cuts is not None else ():
        own = cuts.item == item
        ranks[item] = cuts.rank[own][np.argmax((cuts.end - cuts.begin)[own])]
    order = np.argsort(ranks, kind="stable")
    return replace(
        placed, ranks=ranks, items=order, offsets=np.searchsorted(ranks[order], np.arange(placed.num_ranks + 1))
    )


def _drawn(
    most_units: Int64Array, ranks: Int64Array, rng: np.random.Generator, degrees: Sequence[int] | None
) -> ItemCuts | None:
    fragments = []
    for item, units in enumerate(most_units.tolist()):
        given = rng.choice([1, 1, 2, 4]) if degrees is None else (*degrees, *[1] * len(most_units))[item]
        degree = min(int(given), len(ranks), units)
        if degree < 2:
            continue
        bounds = [0, *np.sort(rng.choice(np.arange(1, units), degree - 1, replace=False)).tolist(), units]
        chosen = rng.permutation(ranks)[:degree].tolist()
        fragments += [(item, *part, units) for part in zip(chosen, bounds[:-1], bounds[1:], strict=True)]
    return ItemCuts(*np.array(fragments, dtype=np.int64).reshape(-1, 5).T) if fragments else None
