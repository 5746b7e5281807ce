"""The least recomputation of a Plan of data parallelism, against what the simulator says of its memory."""

from dataclasses import replace

import pytest

from motet.core.plan import Plan, Unit
from motet.planner.data_parallel.recomputation import least_recomputed
from motet.simulate.predict.predict import predict
from unit.planner.jobs import job

BLOCKS = {"image": 6, "audio": 4, "backbone": 8}


def peak_bytes(of_job, plan):
    return predict(plan, of_job.workload, of_job.cost, seed=of_job.seed).peak_bytes.max()


@pytest.mark.parametrize("memory_mbytes", [470, 600, 900, 4000])
def test_it_fits_and_no_module_could_recompute_a_block_less(memory_mbytes):
    tight = job(num_nodes=1, batch_size=16, spread=0.7, memory_mbytes=memory_mbytes)
    plan = Plan(tight.model, tight.cluster, (Unit("all", (BLOCKS,), dp=4, zero=2),), 16, 2, "data_parallel")
    plan = least_recomputed(tight, plan)
    assert plan is not None and peak_bytes(tight, plan) <= tight.capacity_bytes
    (unit,) = plan.units
    (recompute,) = unit.recompute
    assert (not recompute) == (memory_mbytes == 4000)
    for name, count in recompute.items():
        less = replace(plan, units=(replace(unit, recompute=({**recompute, name: count - 1},)),))
        assert peak_bytes(tight, less) > tight.capacity_bytes


def test_where_nothing_fits_there_is_none():
    tight = job(num_nodes=1, batch_size=16, memory_mbytes=100)
    plan = Plan(tight.model, tight.cluster, (Unit("all", (BLOCKS,), dp=4, zero=0),), 16, 4, "data_parallel")
    assert least_recomputed(tight, plan) is None
