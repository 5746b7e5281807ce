"""What cutting sequences gains in a step under a Plan with stages: a prediction with whole ones, less its own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import motet.train.predicting as predicting
from motet.assign.plan import assign_step
from motet.assign.planned_step import by_replica, decide_planned_step
from motet.core.workload import BACKBONE
from motet.dispatch.edge_messages import assignment_of
from motet.schedule import planned
from motet.simulate.predict.predict import predict_assigned
from motet.train.input.planned import step_seconds
from motet.train.predicting import PredictedRun
from motet.train.report.metrics import cut_items, cut_metrics
from motet.train.step_predictor import StepPredictor, with_whole_sequences
from unit.simulate.jobs import Linear
from unit.simulate.predict.test_shared_sequences import lengths_of, plan_of


def step_of(plan, batch, left_out=()):
    """A step as training has it: its microbatches, what was decided, and which examples were kept."""
    decided = decide_planned_step(plan, batch, step_seconds(planned(plan)))
    kept = [~np.isin(part.examples, left_out) for part in decided.microbatches]
    batches = [
        SimpleNamespace(lengths=part.lengths.keep(here), decision=part.decision.keep(here, part.lengths))
        for part, here in zip(decided.microbatches, kept)
    ]
    return SimpleNamespace(batches=batches, decided=decided, kept=kept)


def predicted(plan, step, cost=Linear):
    return StepPredictor(planned(plan), cost(plan.cluster), "auto").of(step.batches, step.decided, step.kept)


def seconds(plan, assignment):
    return predict_assigned(plan, planned(plan), assignment, Linear(plan.cluster)).step_s


def cut_examples(plan, batch):
    return assign_step(plan, batch, seconds=step_seconds(planned(plan))).modules[BACKBONE].cuts.items


@pytest.mark.parametrize(("order", "balance"), [("given", "joint"), ("both", "off")])
def test_the_gain_is_whole_less_cut(order, balance):
    plan, batch = plan_of(order=order), lengths_of()
    whole = replace(plan, balance=balance)
    whole_s, cut_s = (
        seconds(one, assign_step(one, batch, seconds=step_seconds(planned(one)))) for one in (whole, plan)
    )
    found = predicted(plan, step_of(plan, batch))
    assert found.prediction.step_s == cut_s and found.gained_s == whole_s - cut_s > 0


def test_examples_that_were_left_out_have_no_part_in_either():
    plan, batch = plan_of(), lengths_of()
    whole, cut = with_whole_sequences(plan), cut_examples(plan, batch)
    left_out = [int(cut[0]), 1]
    steps_s = [
        seconds(one, by_replica(one, assignment_of(step_of(one, batch, left_out).batches))) for one in (whole, plan)
    ]
    found = predicted(plan, step_of(plan, batch, left_out))
    assert found.gained_s == steps_s[0] - steps_s[1] < predicted(plan, step_of(plan, batch)).gained_s
    assert predicted(plan, step_of(plan, batch, cut)).gained_s is None


class Slow(Linear):
    """What ranks get of each other takes them a thousand seconds."""

    def gather_seconds(self, size_bytes, ranks):
        return 1000.0


def test_cutting_may_take_longer():
    plan = plan_of()
    step = step_of(plan, lengths_of())
    assert predicted(plan, step, Slow).gained_s < -1000


def test_the_metrics_of_a_step_have_it_for_all_of_its_cuts():
    plan = plan_of()
    step = step_of(plan, lengths_of())
    gained_s = predicted(plan, step).gained_s
    said, items = cut_metrics(step.batches, gained_s), cut_items(step.batches, gained_s)
    assert said["gained_s"] == pytest.approx(gained_s, rel=1e-5) and said["sequences"] == len(items) == 3
    assert all(item["gain_s"] == said["gained_s"] for item in items)
    assert cut_metrics(step.batches)["gained_s"] is None
    # Items that ranks of one replica share are shared in any case.
    shared = [replace(batch.decision, sharing={BACKBONE: 4}) for batch in step.batches]
    batches = [SimpleNamespace(lengths=batch.lengths, decision=each) for batch, each in zip(step.batches, shared)]
    assert all(item["gain_s"] is None for item in cut_items(batches, gained_s))


def test_a_step_that_is_predicted_twice_counts_twice(tmp_path, monkeypatch):
    plan = plan_of()
    plan = replace(plan, cluster=replace(plan.cluster, device=replace(plan.cluster.device, name="cpu")))
    stages = planned(plan)
    monkeypatch.setattr(predicting, "_MAX_ACTIONS", stages.program.num_actions * stages.layout.num_islands)
    recipe = SimpleNamespace(run=SimpleNamespace(dir=tmp_path), context=SimpleNamespace(exchange="auto"))
    chosen = SimpleNamespace(plan=plan, file=Path("plan.json"), replan="REPLAN")
    world = SimpleNamespace(is_first=True, device=torch.device("cpu"))
    step, cut = step_of(plan, lengths_of()), cut_examples(plan, lengths_of())
    without = step_of(plan, lengths_of(), cut)
    measured, said = {"actions": {}, "makespan_s": 1.0}, []
    with PredictedRun(recipe, chosen, world, said.append) as run:
        found = []
        for fed in (without, without, step, step, step, without, without):
            run.start(fed)
            found.append(run.of(SimpleNamespace(), measured, said.append))
    assert [prediction is not None for prediction, _ in found] == [True, True, True, False, True, False, True]
    assert [gained_s is not None for _, gained_s in found] == [False, False, True, False, True, False, False]
    assert not said
