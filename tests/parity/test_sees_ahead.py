"""Stages of a backbone whose rows see some behind them, as images and prefixes do: float64 to 1e-10."""

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from parity.test_bubbles import beside, cut
from parity.test_planned import chain

AHEAD, BOTH = ("ahead",), ("ahead", "prefix")
CASES = {
    2: [
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}), parts=AHEAD, family="gemma2"),
        PlannedCase(
            chain({"i": 3, "a": 2, "b": 2}, {"b": 1}, recompute=({"backbone": 1}, {})),
            "gpipe",
            parts=("prefix",),
            dropout=0.2,
            microbatch_size=2,
        ),
        PlannedCase(
            (Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, replicated=("image", "audio"), zero=1),), parts=BOTH
        ),
        beside(({"backbone": 2}, {"backbone": 1}), cut("image", 3), cut("audio", 1, 1), parts=AHEAD, fill_seed=2),
    ],
    3: [
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 1}, {"b": 1}), "zb_h1", parts=BOTH, left_out=0.3),
        PlannedCase(
            (
                Unit("encoders", ({"image": 3, "audio": 2},)),
                Unit("llm", ({"backbone": 1}, {"backbone": 2}), first_rank=1, pp=2),
            ),
            parts=AHEAD,
            contents=("image",),
        ),
    ],
}


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_whose_rows_see_ahead_equal_one_process(num_ranks):
    assert_planned(num_ranks, CASES[num_ranks])
