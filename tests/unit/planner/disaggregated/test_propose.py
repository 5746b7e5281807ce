"""Units of their own: what is proposed fits, is as pinned, and takes about what is said; what is not, is said why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.core.cluster import Cluster
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan, ScheduleKind
from motet.core.sampler import Distribution, Items, Sampler, Task
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.disaggregated.placed_units import side_of
from motet.planner.disaggregated.propose import propose_disaggregated
from motet.planner.job import Job
from motet.simulate.predict.predict import predict
from unit.planner.jobs import predicted

NARROW, WIDE = Transformer(256, 1024, 4), Transformer(1024, 4096, 16, causal=True)


def model(*, generator: bool = True, trainable: bool = True) -> ModelSpec:
    encoders = [
        connect(vit("image", NARROW, 4, trainable=trainable), 1024),
        connect(audio_encoder("audio", NARROW, 3, trainable=trainable), 1024),
    ]
    generators = [vit("picture", NARROW, 3)] if generator else []
    return multimodal("tiny", language_model(WIDE, 8, 4096), encoders, generators)


def items(length: Distribution) -> dict[str, Items]:
    return {name: Items(length=length, length_per_token=8) for name in ("image", "audio", "picture")}


ALIKE = Task(name="alike", text=Distribution(value=512), items=items(Distribution(value=1024)))
UNLIKE = Task(
    name="unlike",
    text=Distribution(median=400, spread=1.0, max=4096),
    items=items(Distribution(median=500, spread=0.7)),
)


def job(
    spec: ModelSpec | None = None, *, nodes: int = 2, batch: int = 48, gbytes: float = 80, task: Task = ALIKE
) -> Job:
    machines = cluster("a100-80g", nodes)
    machines = replace(machines, device=replace(machines.device, memory_bytes=int(gbytes * 1e9)))
    workload = Sampler(task=(task,)).workload(num_examples=256)
    return Job(spec or model(), machines, workload, batch, Analytic(machines))


FREE = Pins()


def proposed(planned: Job, pins: Pins = FREE) -> list[Candidate]:
    return [one for one in propose_disaggregated(planned, pins) if isinstance(one, Candidate)]


def ruled_out(planned: Job, pins: Pins = FREE) -> list[RuledOut]:
    return [one for one in propose_disaggregated(planned, pins) if isinstance(one, RuledOut)]


def num_recomputed(plan: Plan) -> int:
    return sum(count for unit in plan.units for stage in unit.recompute for count in stage.values())


JOBS = {
    "alike": job(),
    "unlike": job(task=UNLIKE),
    "frozen encoders": job(model(trainable=False)),
    "no generator": job(model(generator=False), nodes=1, batch=15),
    "little memory": job(nodes=1, gbytes=1.1),
}


@pytest.mark.parametrize("planned", JOBS.values(), ids=JOBS)
def test_what_is_proposed_fits_and_runs(planned: Job) -> None:
    found = proposed(planned)
    assert 0 < len(found) <= 6
    for one in found:
        predicted(planned, one)


@pytest.mark.parametrize(("name", "factor"), [("alike", 1.2), ("frozen encoders", 1.2), ("unlike", 2.0)])
def test_estimates_are_near_the_simulated_step(name: str, factor: float) -> None:
    for one in proposed(JOBS[name]):
        step_s = predict(one.plan, JOBS[name].workload, JOBS[name].cost).step_s
        assert step_s / factor < one.estimate_s < step_s * factor


def test_the_best_by_estimate_comes_first_and_always_the_same() -> None:
    found, again = proposed(job()), proposed(job())
    assert [one.estimate_s for one in found] == sorted(one.estimate_s for one in found)
    assert [(one.what, one.plan.units) for one in found] == [(one.what, one.plan.units) for one in again]


@pytest.mark.slow
def test_more_ranks_are_not_slower() -> None:
    best = [proposed(job(nodes=nodes))[0].estimate_s for nodes in (1, 2, 3, 4)]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("planned", JOBS.values(), ids=JOBS)
def test_each_module_has_ranks_of_its_own_and_tensor_groups_stay_in_a_node(planned: Job) -> None:
    for one in proposed(planned):
        assert [unit.modules for unit in one.plan.units] == [(module.name,) for module in planned.model.modules]
        ranks = [rank for unit in one.plan.units for rank in range(unit.first_rank, unit.first_rank + unit.num_ranks)]
        assert len(ranks) == len(set(ranks)) and max(ranks) < planned.cluster.num_ranks
        for unit in one.plan.units:
            assert unit.first_rank % unit.tp == 0 and planned.cluster.ranks_per_node % unit.tp == 0


PINS: list[tuple[Pins, dict[str, int]]] = [
    (Pins(tp=2), {"tp": 2}),
    (Pins(pp=3), {"pp": 3}),
    (Pins(dp=2), {"dp": 2}),
    (Pins(pp=5, tp=1), {"pp": 5, "tp": 1}),  # 8 layers: no faster than 4 stages
    (Pins(tp=2, pp=2, dp=2, microbatch_size=3), {"tp": 2, "pp": 2, "dp": 2}),
    (Pins(pp=2, schedule="interleaved_1f1b"), {"pp": 2}),
]


@pytest.mark.parametrize(("pins", "degrees"), PINS)
def test_pins_hold(pins: Pins, degrees: dict[str, int]) -> None:
    found = proposed(job(nodes=3), pins)
    assert found
    for one in found:
        unit = one.plan.unit_of(BACKBONE)
        assert {name: getattr(unit, name) for name in degrees} == degrees
        assert pins.allow(microbatch_size=one.plan.microbatch_size, schedule=one.plan.schedule)
        assert "none fits" not in one.facts[0]


PAIRS = {
    "MMScale's Figure 9": (2, 3, 1),
    "more replicas than examples": (8, 1, 2),
    "two of five": (5, 2, 1),
    "which share evenly": (2, 4, 1),
}


@pytest.mark.parametrize(("encoders", "backbone", "microbatch_size"), PAIRS.values(), ids=PAIRS)
def test_any_numbers_of_replicas_can_be_pinned(encoders: int, backbone: int, microbatch_size: int) -> None:
    planned = job(model(generator=False))
    stated = {"image": ModuleDegrees(dp=encoders), BACKBONE: ModuleDegrees(dp=backbone)}
    found = proposed(planned, Pins(modules=stated, microbatch_size=microbatch_size))
    assert found
    for one in found:
        assert one.plan.unit_of("image").dp == encoders and one.plan.unit_of(BACKBONE).dp == backbone
        prediction = predict(one.plan, planned.workload, planned.cost)
        assert one.bound_s <= prediction.step_s < 2 * one.estimate_s
        assert "DP for all modules are as good" not in one.facts[0]


def test_recomputation_is_as_pinned() -> None:
    none, full = proposed(job(), Pins(recompute="none")), proposed(job(), Pins(recompute="full"))
    assert none and full
    assert all(num_recomputed(one.plan) == 0 for one in none)
    num_blocks = sum(len(module.blocks) for module in model().modules)
    assert all(num_recomputed(one.plan) == num_blocks for one in full)


def test_recomputes_only_where_memory_lacks() -> None:
    assert all(num_recomputed(one.plan) == 0 for one in proposed(job()))
    pins = Pins(tp=1, pp=4, dp=1, microbatch_size=2)
    (roomy, *_), (tight, *_) = proposed(job(nodes=1), pins), proposed(job(nodes=1, gbytes=1.1), pins)
    assert num_recomputed(tight.plan) > 0
    assert tight.estimate_s > roomy.estimate_s
    assert proposed(job(nodes=1, gbytes=1.1), replace(pins, recompute="none")) == []


def test_what_lacks_memory_is_said_with_its_bytes() -> None:
    found = ruled_out(job(nodes=1, gbytes=0.3))
    assert found and all(one.shortfall_bytes > 0 and "lacks" in one.why for one in found)
    assert proposed(job(nodes=1, gbytes=0.3)) == []


REFUSED = [
    (Pins(schedule="zb_v"), "pinned to 'zb_v'"),
    (Pins(tp=3), "TP is pinned to 3"),
    (Pins(pp=9), "it must be 1 to 8"),
    (Pins(dp=5), "is no multiple"),
]


@pytest.mark.parametrize(("pins", "why"), REFUSED)
def test_pins_that_cannot_be_are_refused(pins: Pins, why: str) -> None:
    (one,) = propose_disaggregated(job(), pins)
    assert isinstance(one, RuledOut) and why in one.why


def test_a_backbone_alone_is_not_taken_apart() -> None:
    alone = multimodal("text", language_model(WIDE, 8, 4096), [])
    (one,) = propose_disaggregated(job(alone), Pins())
    assert isinstance(one, RuledOut) and "has one module" in one.why


def test_fewer_ranks_than_units_are_too_few() -> None:
    planned = job()
    few: Cluster = replace(planned.cluster, num_nodes=1, ranks_per_node=2)
    (one,) = propose_disaggregated(replace(planned, cluster=few, cost=Analytic(few)), Pins())
    assert isinstance(one, RuledOut) and "2 ranks are too few" in one.why


def test_what_neither_feeds_nor_is_fed_by_the_backbone_has_no_side() -> None:
    spec = model()
    between = replace(spec, edges=(*spec.edges, ("image", "picture")))
    sides: Sequence[int] = [side_of(between, module.name) for module in between.modules]
    assert sides == [0, -1, 0, 0]
    (one,) = propose_disaggregated(job(between), Pins())
    assert isinstance(one, RuledOut) and "'image'" in one.why


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved_1f1b"])
def test_chunks_of_the_backbone_fit_and_run_too(name: str, schedule: ScheduleKind) -> None:
    planned = JOBS[name]
    for one in proposed(planned, Pins(pp=2, schedule=schedule)):
        unit = one.plan.unit_of(BACKBONE)
        assert one.plan.schedule == schedule
        assert (len(unit.stages) > unit.pp) == (schedule == "interleaved_1f1b")
        assert all(len(other.stages) == other.pp for other in one.plan.units if other is not unit)
        predicted(planned, one)


def test_a_backbone_in_one_stage_has_no_chunks_to_interleave() -> None:
    (one,) = propose_disaggregated(job(), Pins(pp=1, schedule="interleaved_1f1b"))
    assert isinstance(one, RuledOut) and "the backbone has one stage" in one.why


def test_facts_compare_with_the_rigid_allocation() -> None:
    first = proposed(job())[0]
    assert any(fact.startswith("Ranks: image ") for fact in first.facts)
    used = sum(unit.num_ranks for unit in first.plan.units)
    assert np.sum([int(part.split()[-1]) for part in first.facts[0].split(";")[0].split(",")]) == used
