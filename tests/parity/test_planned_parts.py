"""Plans of a model with queries, with callbacks that make tiles, and with images that two encoders read.

Each equals one process: float64 to 1e-10, as in test_planned.py.
"""

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from parity.test_bubbles import beside, cut
from parity.test_planned import chain
from tiers import in_tiers

TWICE = {"i": 3, "s": 1}, {"s": 1, "a": 2, "b": 3}
"""The second encoder is cut."""
QUERIED = {"i": 4, "s": 3, "a": 3}
CASES = {
    2: [
        # A parameter of one number, and one of whole numbers, which no rank shares out.
        *(PlannedCase(chain({"i": 3, "a": 2, "b": 3}, dp=2, zero=z), parts=("gate",)) for z in (1, 2, 3)),
        PlannedCase(chain({"i": 3, "a": 2, "b": 3}, dp=2, zero=2), parts=("gate",), is_mixed=True),
        # Cut before and behind a projector with queries, and recomputed with it.
        PlannedCase(chain({"i": 3}, {"i": 1, "a": 3, "b": 3}), parts=("queries",)),
        PlannedCase(chain({"i": 4, "a": 2}, {"a": 1, "b": 3}), "gpipe", parts=("queries",), blocking=True),
        PlannedCase(
            chain({"i": 3}, {"i": 1, "a": 3, "b": 3}, recompute=({"image": 2}, {"image": 1, "audio": 2})),
            parts=("queries", "tiles"),
            microbatch_size=2,
        ),
        PlannedCase(chain({"i": 2}, {"i": 2, "a": 3, "b": 3}), parts=("queries",), frozen=("image encoder", "audio")),
        # A callback before an encoder that is cut, with weights.
        PlannedCase(chain({"i": 1}, {"i": 2, "a": 2, "b": 3}), parts=("tiles",), frozen=("image",)),
        PlannedCase(chain({"i": 3, "a": 1}, {"a": 1, "b": 3}), "zb_h1", parts=("tiles",), microbatch_size=2),
        # Images that two encoders read.
        PlannedCase(chain(*TWICE), parts=("rows",)),
        PlannedCase(chain(*TWICE), "gpipe", parts=("sum",), frozen=("image",), tied=True),
        PlannedCase(chain({"i": 4, "s": 2}, {"s": 1, "a": 3, "b": 3}), parts=("sum", "queries"), contents=("image",)),
        PlannedCase(chain({"i": 2}, {"i": 1, "s": 2, "a": 2, "b": 3}), parts=("rows", "tiles"), contents=("audio",)),
        PlannedCase(
            (Unit("llm", ({"backbone": 1}, {"backbone": 2}), pp=2, replicated=("image", "second", "audio"), zero=1),),
            parts=("sum", "queries"),
        ),
        beside(
            ({"audio": 3, "backbone": 1}, {"backbone": 2}),
            cut("image", 3, 1),
            cut("second", 3),
            parts=("rows", "queries"),
            fill_seed=3,
        ),
        # A copy beside a stage in which nothing learns.
        *(
            PlannedCase(
                (Unit("llm", ({"image": 2}, {"image": 1, "backbone": 3}), pp=2, replicated=("audio",), zero=zero),),
                schedule,
                frozen=("image encoder",),
            )
            for schedule, zero in (("zb_h1", 0), ("1f1b", 3))
        ),
    ],
    3: [
        PlannedCase(
            (
                Unit("image", ({"image": 3},), zero=0),
                Unit("second", ({"second": 2},), first_rank=1, zero=0),
                Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=2, zero=0),
            ),
            parts=("sum",),
        ),
        PlannedCase(chain({"i": 2, "s": 1}, {"i": 1, "s": 1, "a": 2, "b": 1}, {"b": 2}), parts=("sum",)),
        PlannedCase(
            (
                Unit("encoders", ({"image": 4, "second": 3, "audio": 3},), dp=2, zero=0),
                Unit("llm", ({"backbone": 3},), first_rank=2, zero=0),
            ),
            parts=("rows", "queries"),
            balance="per_phase",
            microbatch_size=2,
        ),
    ],
    4: [
        PlannedCase(chain(QUERIED, {"b": 3}, dp=2, zero=3), parts=("sum", "queries"), batch_size=8),
        PlannedCase(
            (
                Unit("image", ({"image": 1}, {"image": 2}), pp=2, zero=0),
                Unit("llm", ({"second": 2, "audio": 2, "backbone": 1}, {"backbone": 2}), first_rank=2, pp=2, zero=0),
            ),
            parts=("rows", "tiles"),
        ),
        beside(({"backbone": 1}, {"backbone": 2}), cut("image", 3), cut("second", 1, 1), cut("audio", 2), dp=2,
               parts=("sum",), batch_size=8),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: (1, 3, 6, 10), 3: (0,)}))
def test_models_with_more_parts_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)
