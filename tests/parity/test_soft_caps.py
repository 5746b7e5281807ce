"""Gemma 2 under Plans equals one process: its scores are computed again in backward, whole, in halves or by heads."""

import pytest

from parity.planned import PlannedCase, assert_planned
from parity.test_schedules import CUTS, on_ranks
from parity.test_tensor_parallel_plans import ALL
from parity.test_tensor_parallel_plans import chain as tensor_parallel


def test_soft_caps_in_stages():
    recompute = ({"image": 2}, {"backbone": 2})
    assert_planned(
        2,
        [
            PlannedCase(on_ranks(2, *CUTS["zb_h1", 2]), "zb_h1", family="gemma2"),
            PlannedCase(on_ranks(2, *CUTS["zb_v", 2]), "zb_v", family="gemma2", dropout=0.2),
            PlannedCase(on_ranks(2, *CUTS["zb_h1", 2], recompute=recompute), "1f1b", family="gemma2", dropout=0.2),
        ],
    )


@pytest.mark.slow
def test_soft_caps_over_tensor_parallel_ranks():
    assert_planned(2, [PlannedCase(tensor_parallel(ALL), family="gemma2", dropout=dropout) for dropout in (0.0, 0.2)])
