"""The parts of a job that do not speak to each other: which are alike, which is the slowest, and what chance adds."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.plan import Unit
from motet.core.workload import ItemLengths
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned, predictions
from unit.simulate.even_jobs import EVEN, LAYER_B, LAYER_F, Free, even, step
from unit.simulate.jobs import (
    CHAIN,
    alike,
    lengths,
    plan,
    workload,
)


def test_the_slowest_island_is_the_step():
    """Four replicas, and all that is long in the third one's part of the only microbatch."""
    batch = even(8)
    batch.sequence[4:6] *= 3
    made = plan(Unit("all", ({"image": 4, "backbone": 12},), dp=4), spec=EVEN, batch_size=8, microbatch_size=2)
    cost = Free(made.cluster)
    placed = assign_batch(made, batch, cost)
    found = predict_assigned(made, planned(made), placed, cost)
    assert found.step_s == pytest.approx(2 * (4 + 3 * 12) * (LAYER_F + LAYER_B))


def test_islands_are_told_apart_by_targets_too():
    """Two replicas of like lengths; loss is taken on more tokens in the second."""
    batch = alike(2)
    batch.num_targets[1] *= 2
    made = plan(Unit("all", ({"image": 4, "audio": 3, "backbone": 8},), dp=2), batch_size=2)
    cost = Free(made.cluster)
    found = predict_assigned(made, planned(made), assign_batch(made, batch, cost), cost)
    swapped = replace(batch, num_targets=batch.num_targets[::-1])
    other = predict_assigned(made, planned(made), assign_batch(made, swapped, cost), cost)
    assert found.step_s == other.step_s


def test_islands_whose_last_have_no_items_are_told_apart():
    """Three islands of two encoder replicas; images are in the first two alone, and more of them in the second."""
    batch = even(6)
    few = ItemLengths(np.array([0, 1, 2]), np.array([20, 20, 20]), np.array([5, 5, 5]))
    units = Unit("image", ({"image": 4},), dp=6), Unit("llm", ({"backbone": 12},), first_rank=6, dp=3)
    made = plan(*units, spec=EVEN, batch_size=6, microbatch_size=2)
    cost = Free(made.cluster)
    placed = assign_batch(made, replace(batch, items={"image": few}), cost)
    assert len({placed.island_key(island, 3) for island in range(3)}) == 3


def test_islands_that_are_alike_are_simulated_once(monkeypatch):
    import motet.simulate.predict.predict as module

    made, ran = plan(Unit("all", CHAIN, pp=3, dp=4)), []
    monkeypatch.setattr(module, "simulate", lambda *a, _run=module.simulate, **k: ran.append(1) or _run(*a, **k))
    compared, found = [], module.makespans
    monkeypatch.setattr(module, "makespans", lambda *a: compared.append(a[2]) or found(*a))
    once = step(made, alike(1))
    assert len(ran) == 1 and not compared
    assert once.step_s == step(replace(made, units=(replace(made.units[0], dp=1),), batch_size=4), alike(1)).step_s
    ran.clear()
    step(made, lengths())
    assert len(ran) == 1 and compared == [4]
    ran.clear()
    step(made, alike(1), jitter=0.1)
    assert len(ran) == 4


def test_one_seed_one_prediction():
    made = plan(Unit("all", CHAIN, dp=2, pp=3))
    runs = [step(made, lengths(200), seed=seed, jitter=0.2) for seed in (1, 1, 2)]
    assert list(runs[0].timeline) == list(runs[1].timeline)
    assert runs[0].step_s != runs[2].step_s
    batches = list(predictions(made, workload(lengths(200)), Free(made.cluster), 3, seed=1, jitter=0.2))
    assert batches[0].step_s == runs[0].step_s and len({each.step_s for each in batches}) == 3


def test_jitter_makes_a_pipeline_longer():
    made = plan(Unit("all", CHAIN, dp=2, pp=3), batch_size=64)
    assert step(made, alike(1), jitter=0.4).step_s > 1.005 * step(made, alike(1)).step_s
