"""A sample of the batch says about what the whole batch does, and is the whole batch where that is small."""

from dataclasses import replace

import pytest

from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.analytic import Analytic
from motet.planner.data_parallel.loads import assigned_load, sample_of
from motet.planner.data_parallel.search import sampled_s
from motet.planner.data_parallel.zero import ShardedUnit, step_s
from motet.planner.job import Job

MODEL = multimodal(
    "small",
    language_model(Transformer(512, 2048, 8, causal=True), 6, 4000),
    [connect(vit("image", Transformer(256, 1024, 4), 5), 512, downsample=4)],
)
IMAGES = {"length": {"median": 500, "spread": 0.5, "max": 2000}, "length_per_token": 4}
WORKLOAD = Sampler.model_validate(
    {"task": [{"name": "images", "text": {"median": 200, "spread": 0.7, "max": 900}, "items": {"image": IMAGES}}]}
).workload(num_examples=2000)
STAGE = {"image": 5, "backbone": 6}


def job(num_nodes, batch_size):
    device = Device("test", {"bf16": 2e13}, 80 * 10**9, 1e12)
    cluster = Cluster(device, num_nodes, 4, Link(1e11, 3e-6), Link(1e10, 1e-5))
    return Job(MODEL, cluster, WORKLOAD, batch_size, Analytic(cluster))


def plan(given, dp, microbatch_size, **unit):
    everything = Unit("all", (STAGE,), dp=dp, zero=3, **unit)
    size = given.batch_size
    return Plan(MODEL, given.cluster, (everything,), size, microbatch_size, "data_parallel", balance="joint")


def test_a_small_batch_is_its_own_sample():
    given = job(4, 256)
    assert sample_of(plan(given, 16, 2, shard_size=8)) == plan(given, 16, 2, shard_size=8)


def test_a_sample_has_whole_nodes_and_some_microbatches():
    given = job(75, 300 * 24)
    sampled = sample_of(plan(given, 300, 3, shard_size=100))
    assert (sampled.units[0].dp, sampled.units[0].shard_size, sampled.batch_size) == (256, 0, 256 * 3 * 2)


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_a_sample_takes_about_what_the_whole_batch_takes(microbatch_size):
    given = job(75, 300 * 24)
    made = plan(given, 300, microbatch_size)
    whole_s = step_s(assigned_load(given, made), ShardedUnit.of(given, made.units[0]), {}, exchanged=False)
    assert sampled_s(given, made) == pytest.approx(whole_s, rel=0.05)


def test_plans_that_differ_in_who_computes_what_share_a_program():
    given = job(4, 256)
    unit = Unit("all", ({"image": 5, "backbone": 2}, {"backbone": 4}), dp=8, pp=2)
    made = Plan(MODEL, given.cluster, (unit,), 256, 2)
    first = given.planned(made)
    assert (
        given.planned(replace(made, order="both")) is first and given.planned(replace(made, balance="joint")) is first
    )
    assert given.planned(replace(made, microbatch_size=1)) is not first
