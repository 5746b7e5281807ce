"""A Plan that lacks memory is given the share of its blocks that it lacks: it fits, with less than all recomputed."""

from dataclasses import replace
from math import ceil

import pytest

from motet.core.plan import Plan, Unit
from motet.cost.memory import USABLE_MEMORY
from motet.planner.more_recomputed import all_recomputed, share_recomputed
from motet.simulate.predict.predict import predict
from unit.planner.jobs import job

JOB = job(spread=0.0, batch_size=16)


def with_capacity(num_bytes):
    """The job on devices of which a Plan may fill so many bytes."""
    device = replace(JOB.cluster.device, memory_bytes=ceil(num_bytes / USABLE_MEMORY))
    return replace(JOB, cluster=replace(JOB.cluster, device=device))


def predicted(plan):
    return predict(plan, JOB.workload, JOB.cost, seed=JOB.seed)


def chain(schedule, *stages, **degrees):
    return Plan(JOB.model, JOB.cluster, (Unit("all", stages, **degrees),), 16, 1, schedule)


@pytest.mark.parametrize(
    "plan",
    [
        chain("1f1b", {"image": 6, "audio": 4}, {"backbone": 4}, {"backbone": 4}, pp=3, dp=2),
        chain("zb_v", {"image": 6}, {"audio": 4}, {"backbone": 4}, {"backbone": 4}, pp=2, cp=2),
    ],
    ids=["1F1B", "ZB-V"],
)
@pytest.mark.parametrize("part", [0.3, 0.5, 0.7])
def test_it_fits_with_less_than_all(plan, part):
    lacking, least = predicted(plan), predicted(all_recomputed(plan))
    capacity = int(least.peak_bytes.max() + part * (lacking.peak_bytes.max() - least.peak_bytes.max()))
    found = share_recomputed(with_capacity(capacity), plan, lacking, least)
    assert predicted(found).peak_bytes.max() <= capacity
    counts = [sum(stage.values()) for stage in found.units[0].recompute]
    assert 0 < sum(counts) < sum(sum(stage.values()) for stage in plan.units[0].stages)


def test_ranks_that_lack_nothing_recompute_what_they_did():
    """Under 1F1B the first rank holds the most microbatches. It alone lacks memory here."""
    plan = chain("1f1b", {"image": 6, "audio": 4, "backbone": 2}, {"backbone": 3}, {"backbone": 3}, pp=3)
    own = replace(plan.units[0], recompute=({}, {}, {"backbone": 1}))
    plan = replace(plan, units=(own,))
    lacking, least = predicted(plan), predicted(all_recomputed(plan))
    assert lacking.peak_bytes.argmax() == 0
    capacity = int(lacking.peak_bytes.max()) - 1
    first, *others = share_recomputed(with_capacity(capacity), plan, lacking, least).units[0].recompute
    assert set(first.values()) == {1} and others == [{"backbone": 0}, {"backbone": 1}]
