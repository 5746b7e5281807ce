"""Decisions in which sequences are cut anywhere, over any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from motet.core.cuts import SequenceCuts
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
    num_ranks, fragments = decision.backbone.num_ranks, []
    ranks = np.arange(num_ranks - idle)
    for example, rows in enumerate(lengths.sequence.tolist()):
        given = rng.choice([1, 1, 2, 4]) if degrees is None else (*degrees, *[1] * lengths.num_examples)[example]
        units = -(-rows // 2)
        degree = min(int(given), len(ranks), units)
        if degree < 2:
            continue
        bounds = [0, *np.sort(rng.choice(np.arange(1, units), degree - 1, replace=False)).tolist(), units]
        chosen = rng.permutation(ranks)[:degree].tolist()
        fragments += [(example, *part, units) for part in zip(chosen, bounds[:-1], bounds[1:], strict=True)]
    placed = decision.backbone.ranks % len(ranks)
    order = np.argsort(placed, kind="stable")
    offsets = np.searchsorted(placed[order], np.arange(num_ranks + 1))
    backbone = replace(decision.backbone, ranks=placed, items=order, offsets=offsets)
    cuts = SequenceCuts(*np.array(fragments, dtype=np.int64).reshape(-1, 5).T) if fragments else None
    return replace(decision, assignments=decision.assignments | {"backbone": backbone}, cuts=cuts)
