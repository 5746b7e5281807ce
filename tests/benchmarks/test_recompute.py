"""What benchmarks/recompute.py makes of measured steps."""

import numpy as np
import pytest

from benchmark import benchmark


def test_ratios_are_of_the_slowest_rank_step_by_step():
    with benchmark("recompute") as recompute:
        rng, scale = np.random.default_rng(0), np.array([1.0, 1.5, 1.25, 1.1])
        taken = np.full((2, 8, 4, 3), 2.0)
        # Step and processor time of rank 1, which is the slower one; its steps differ, and the ratios do not.
        taken[0, :, :, :2] = 0.1
        taken[1, :, :, :2] = rng.uniform(1, 9, 8)[:, None, None] * scale[None, :, None]
        found = {row.name: row for row in recompute.rows_of(taken, np.full((2, 8), 0.01), 0.5, 0.25)}
    for kind in ("step", "processor"):
        for way, expected in zip(recompute.WAYS[1:], scale[1:], strict=True):
            name = f"{kind}: {way} recomputed, over nothing"
            for end in ("", ": 95 % interval, low", ": 95 % interval, high"):
                assert found[name + end].value == pytest.approx(expected) and found[name + end].goal is None
        assert found[f"{kind}: each its own recomputed, over all"].value == pytest.approx(1.1 / 1.5)
        assert found[f"{kind}: each its own recomputed, over all"].met
    assert found["losses: largest relative difference"].value == 0
    assert found["blocks: share recomputed, each its own"].met
