"""Encoders that feed several stages, as their rows enter the backbone again: float64 to 1e-10."""

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from parity.test_bubbles import beside, cut
from parity.test_planned import chain
from tiers import in_tiers

AGAIN = ("again",)
IMAGE, AUDIO = Unit("image", ({"image": 3},), zero=0), Unit("audio", ({"audio": 2},), first_rank=1, zero=0)
BY_ONE = ({"backbone": 1}, {"backbone": 1}, {"backbone": 1})
"""The rows of audio enter each stage, those of images the first and the last."""
BY_TWO = ({"audio": 2}, *BY_ONE)
"""Stages of two ranks."""
CASES = {
    2: [
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}), parts=AGAIN),
        PlannedCase(chain({"i": 3, "a": 1}, {"a": 1, "b": 3}), "gpipe", parts=AGAIN, tied=True),
        PlannedCase(
            chain({"i": 3, "a": 2, "b": 1}, {"b": 2}, recompute=({"backbone": 1}, {"backbone": 1})),
            parts=AGAIN,
            frozen=("image encoder",),
            blocking=True,
        ),
        PlannedCase(
            (Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, replicated=("image", "audio"), zero=1),), parts=AGAIN
        ),
        PlannedCase(
            (Unit("all", ({"image": 3}, {"audio": 2, "backbone": 1}, {"backbone": 1}, {"backbone": 1}), pp=2, zero=0),),
            "interleaved_1f1b",
            parts=AGAIN,
            batch_size=8,
        ),
        # In bubbles: an encoder has an edge to each stage of the backbone that its rows enter.
        beside(({"backbone": 2}, {"backbone": 1}), cut("image", 3), cut("audio", 1, 1), parts=AGAIN, fill_seed=2),
        beside(BY_TWO, cut("image", 1, 2), parts=AGAIN, schedule="interleaved_1f1b", batch_size=8, blocking=True),
        beside(
            ({"backbone": 1}, {"backbone": 2}),
            ({"image": 3, "audio": 2},),
            parts=AGAIN,
            frozen=("image",),
            filling="by_step",
            fill_seed=5,
        ),
    ],
    3: [
        PlannedCase(
            (IMAGE, Unit("llm", ({"audio": 2, "backbone": 1}, {"backbone": 2}), first_rank=1, pp=2)), parts=AGAIN
        ),
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 1}, {"b": 1}), "zb_h1", parts=AGAIN, frozen=("audio",)),
        PlannedCase((IMAGE, AUDIO, Unit("llm", ({"backbone": 3},), first_rank=2)), parts=AGAIN, contents=("audio",)),
    ],
    4: [
        PlannedCase((IMAGE, Unit("llm", ({"audio": 2, "backbone": 1}, *BY_ONE[1:]), first_rank=1, pp=3)), parts=AGAIN),
        PlannedCase(
            (
                Unit("encoders", ({"image": 3, "audio": 2},), dp=2, zero=0),
                Unit("llm", ({"backbone": 2}, {"backbone": 1}), first_rank=2, pp=2, zero=0),
            ),
            parts=("again", "tiles"),
            balance="per_phase",
            microbatch_size=2,
        ),
        PlannedCase(
            chain({"i": 3, "a": 2, "b": 1}, {"b": 2}, dp=2, zero=3), parts=AGAIN, batch_size=8, balance="joint"
        ),
    ],
    5: [PlannedCase((IMAGE, AUDIO, Unit("llm", BY_ONE, first_rank=2, pp=3)), parts=AGAIN, frozen=("image",))],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: (1, 3, 5), 3: (1,), 4: (1,)}))
def test_rows_that_enter_the_backbone_again_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)
