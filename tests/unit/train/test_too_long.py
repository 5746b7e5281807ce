"""Which `cp` would hold an example that needs more memory than a rank has."""

from dataclasses import replace

import pytest

from motet.core.cluster import Cluster
from motet.core.plan import Plan, Unit
from motet.planner.alone import bytes_alone
from motet.train.too_long import too_long
from unit.planner.test_alone import DEVICE, LINK, MODEL, WHOLE, lengths_of

LONG = lengths_of([200, 100_000], [[], []])
STAGES = {"image": 2, "backbone": 1}, {"backbone": 3}


def found_of(unit, schedule, held_by):
    """What is too long where a rank of `held_by` has just room for the longest example."""
    cluster = Cluster(DEVICE, 1, unit.num_ranks, LINK, LINK)
    plan = Plan(MODEL, cluster, (unit,), 12, schedule=schedule, precision="fp32")
    ranks = max(held_by.num_ranks, unit.num_ranks)
    by = Plan(MODEL, replace(cluster, ranks_per_node=ranks), (held_by,), 12, schedule="1f1b", precision="fp32")
    device = replace(DEVICE, memory_bytes=int(1.01 * bytes_alone(by, LONG)[1] / 0.94))
    return too_long(replace(plan, cluster=replace(cluster, device=device)), 2, LONG.take)


@pytest.mark.parametrize(
    ("unit", "schedule", "cp"),
    [
        (Unit("all", (WHOLE,), dp=3), "data_parallel", 3),
        (Unit("all", (WHOLE,), dp=6), "data_parallel", 3),
        (Unit("all", (WHOLE,), dp=12), "data_parallel", 6),
        (Unit("all", (WHOLE,), dp=3, cp=2), "1f1b", 6),
        (Unit("all", STAGES, pp=2, dp=3), "1f1b", 3),
        # One stage on the ranks of all.
        (Unit("all", STAGES, pp=2), "1f1b", 2),
        (Unit("all", STAGES, pp=2, dp=2, recompute=({"backbone": 1}, {"backbone": 2})), "gpipe", 4),
    ],
)
def test_the_fewest_ranks_that_hold_it_are_named(unit, schedule, cp):
    share = cp // unit.cp
    in_one = {"stages": (WHOLE,), "pp": 1, "recompute": ({"backbone": 3},) if unit.recompute else ()}
    held_by = replace(unit, dp=max(unit.dp // share, 1), cp=cp, zero=1, **(in_one if unit.dp % share else {}))
    found = found_of(unit, schedule, held_by)
    assert (found.ids.tolist(), found.cp.tolist()) == ([1], [cp])
    assert found.reason(0).endswith(f"; a plan with cp = {cp} could hold it")


@pytest.mark.parametrize(("dp", "most"), [(1, 1), (2, 2), (3, 3), (6, 6)])
def test_the_most_ranks_that_were_asked_are_named(dp, most):
    found = found_of(Unit("all", (WHOLE,), dp=dp), "data_parallel", Unit("all", (WHOLE,), cp=16))
    assert found.cp.tolist() == [0] and f"no cp up to {most} could hold it" in found.reason(0)
