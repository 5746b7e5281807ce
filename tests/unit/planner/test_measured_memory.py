"""Where a profile has the bytes that layers keep, the planner refuses and takes Plans by these."""

from dataclasses import replace

import pytest

from motet.cost.analytic import Analytic
from motet.cost.memory import with_measured_bytes
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES
from motet.simulate.predict.predict import predict
from unit.planner.jobs import job


class Keeping(Analytic):
    """Layers keep `share` of what they are said to keep."""

    share = 1.0

    def as_measured(self, model):
        layers = [(module.name, layer) for module in model.modules for layer in dict.fromkeys(module.layers)]
        return with_measured_bytes(model, dict.fromkeys(layers, self.share))


class KeepingMore(Keeping):
    share = 2.5


class KeepingLess(Keeping):
    share = 0.3


@pytest.mark.parametrize("name", ["data parallel", "chain"])
def test_a_plan_fits_by_what_was_measured(name):
    """In memory that is short by what layers are said to keep, they recompute."""
    stated = job(memory_mbytes=700, spread=0.5)
    only = {name: STRATEGIES[name]}
    jobs = stated, replace(stated, cost=KeepingMore(stated.cluster)), replace(stated, cost=KeepingLess(stated.cluster))
    best = [search(each, only, is_refined=False).best.candidate.plan for each in jobs]

    def peak_bytes(of, number):
        plan = replace(best[number], model=of.model)
        return predict(plan, of.workload, of.cost, seed=of.seed).peak_bytes.max()

    for number, each in enumerate(jobs):
        assert peak_bytes(each, number) <= each.capacity_bytes
        assert best[number].model == stated.model  # A file of it says nothing of bytes.
    assert peak_bytes(jobs[1], 0) > stated.capacity_bytes  # The best by what is said is refused,
    assert peak_bytes(stated, 2) > stated.capacity_bytes  # and one is taken that does not fit by that.
