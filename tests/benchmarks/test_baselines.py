"""What the papers compare with (benchmarks/baselines): Plans that run, no faster than what the planner finds."""

import numpy as np
import pytest

from benchmark import benchmark
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.planner.candidate import Candidate, Pins
from motet.planner.chain import anchored_cut
from motet.planner.chain.propose import propose_chain
from motet.planner.degrees import Degrees
from motet.planner.disaggregated.allocate import allocate
from motet.planner.disaggregated.allocation import Limits
from motet.planner.job import Job
from motet.planner.modality_parallel.propose import propose_modality_parallel
from motet.planner.stages.blocks import blocks_of
from motet.schedule import program_of, validate
from motet.simulate.predict.predict import predict
from unit.planner.disaggregated.test_allocate import alike
from unit.planner.jobs import job, model


@pytest.fixture(scope="module")
def chains():
    with benchmark("baselines.chains") as module:
        yield module


@pytest.fixture(scope="module")
def modalities():
    with benchmark("baselines.modalities") as module:
        yield module


@pytest.fixture(scope="module")
def allocations():
    with benchmark("baselines.allocations") as module:
        yield module


def proposed(given_job, pins, by=propose_modality_parallel):
    return [one for one in by(given_job, pins) if isinstance(one, Candidate)]


VISION = {"S": (40, 1408, 6144, 16), "M": (32, 4096, 20_480, 32), "L": (48, 5120, 25_600, 40)}
SAMPLE = {"name": "1,024 tokens and an image", "text": {"value": 1024}}


def vlm(size):
    """Cornstarch Table 1 with the medium LLM, frozen but for the projector, on its 24 A40 (section 6.1)."""
    num_layers, hidden, mlp, num_heads = VISION[size]
    llm = Transformer(4096, 14_336, 32, 8, gated=True, norm="rms", biases=(), causal=True)
    encoder = vit("image", Transformer(hidden, mlp, num_heads), num_layers, trainable=False)
    spec = multimodal(size, language_model(llm, 32, 128_256, trainable=False), [connect(encoder, 4096, "linear")])
    items = {"image": {"length": {"value": 1600}, "length_per_token": 3.2}}
    lengths = Sampler.model_validate({"task": [SAMPLE | {"items": items}]}).workload(num_examples=24)
    devices = cluster("a40", 6, ranks_per_node=4)
    return Job(spec, devices, lengths, 24, Analytic(devices))


@pytest.mark.parametrize(("size", "published"), [("S", 6.47 / 5.30), ("M", 5.15 / 3.73), ("L", 3.17 / 2.06)])
def test_to_know_what_is_frozen_gains_about_what_cornstarch_measured(modalities, size, published):
    """Table 3: 1.22, 1.38 and 1.53 times the throughput a GPU. How long its images are is not said: 1,600 patches."""
    given_job, pins = vlm(size), Pins(tp=2, dp=1, microbatch_size=1, recompute="full")
    candidates = proposed(given_job, pins)
    per_gpu = []
    for plan in (candidates[0].plan, modalities.frozen_unaware(given_job, pins)):
        found = predict(plan, given_job.workload, given_job.cost)
        per_gpu.append(found.examples_per_s / found.num_ranks)
    assert per_gpu[0] / per_gpu[1] == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["encoders_colocated", "encoders_replicated"])
def test_encoders_beside_the_backbone_are_plans(modalities, name, recomputed):
    given_job = job(model(frozen=True))
    is_colocated = name == "encoders_colocated"
    plan = getattr(modalities, name)(given_job, modalities.Stages(3, 2 if is_colocated else 0, recomputed=recomputed))
    validate(program_of(plan))
    assert predict(plan, given_job.workload, given_job.cost).step_s > 0
    if is_colocated:
        assert [set(stage) for stage in plan.units[0].stages[:2]] == [{"image", "audio"}] * 2
    else:
        assert plan.units[0].replicated == ("image", "audio")


def test_replicated_encoders_are_slower_than_those_with_ranks_of_their_own(modalities):
    given_job = job(model(frozen=True))
    pins = Pins(tp=1, dp=1, pp=4, microbatch_size=1, recompute="none")
    plans = modalities.encoders_replicated(given_job, modalities.Stages(4)), proposed(given_job, pins)[0].plan
    replicated, parallel = (predict(plan, given_job.workload, given_job.cost).step_s for plan in plans)
    assert parallel < replicated


@pytest.mark.parametrize("name", ["by_layers", "by_parameters", "encoders_first"])
def test_chains_cut_without_seconds_run_and_are_no_faster(chains, name):
    given_job, degrees = job(), Degrees(1, 4, 2, 1, 16)
    cut = chains.encoders_first if name == "encoders_first" else getattr(anchored_cut, name)
    other = chains.chain_plan(given_job, degrees, cut)
    validate(program_of(other))
    ours = proposed(given_job, Pins(tp=1, pp=4, dp=2, microbatch_size=1, schedule="1f1b"), by=propose_chain)[0].plan
    seconds = [predict(plan, given_job.workload, given_job.cost).step_s for plan in (ours, other)]
    assert seconds[0] <= seconds[1]


def test_all_encoders_are_with_the_first_stage(chains):
    blocks = blocks_of(job(), ("image", "audio", "backbone"), 1, 1, 1)
    assert np.bincount(chains.encoders_first(blocks, 4)).tolist() == [12, 2, 2, 2]


def test_ranks_in_proportion_to_operations_are_within_their_shares(allocations):
    units = [
        alike("image", -1, 1.0, sizes=(1, 2, 4), num_stages=2),
        alike("backbone", 0, 7.0, sizes=(1,), num_stages=8),
    ]
    limits = Limits(32, 64)
    found, best = allocations.proportional(units, {"image": 1.0, "backbone": 7.0}, limits), allocate(units, limits)
    assert found is not None and best is not None
    assert found.shares[0].num_ranks <= 4 and found.shares[1].num_ranks <= 28
    assert best.time_s <= found.time_s
