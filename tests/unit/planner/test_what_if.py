"""What would change the best Plan: each change is planned anew, and a gain is one of a Plan that fits."""

from dataclasses import replace

import pytest

from motet.cost.analytic import Analytic
from motet.planner.candidate import CHAIN, DATA_PARALLEL, Pins, predict_candidate
from motet.planner.evaluation import Quota
from motet.planner.search import NO_PINS, search
from motet.planner.strategies import STRATEGIES
from motet.planner.what_if import Change, is_quick, what_if
from unit.planner.jobs import job, model


def changes_of(given, pins=NO_PINS):
    found = search(given, STRATEGIES, pins, max_simulated=4)
    return found, what_if(found, STRATEGIES)


@pytest.mark.slow
def test_memory_helps_where_it_is_scarce_and_not_where_it_is_plenty():
    """1 GB recomputes; 64 GB does not, and twice as much changes nothing."""
    scarce, plenty = (job(model(), memory_mbytes=mbytes, num_nodes=1, batch_size=32) for mbytes in (1000, 64_000))
    found, changes = changes_of(scarce)
    memory = next(changes)
    assert memory.what == "With 2 times the memory, 2 GB a device"
    unlimited = search(plenty, STRATEGIES, max_simulated=4)
    best_s, unlimited_s = found.best.prediction.step_s, unlimited.best.prediction.step_s
    assert 0 <= memory.gain <= best_s / unlimited_s - 1 + 0.02
    assert next(what_if(unlimited, STRATEGIES)).gain < 0.02


@pytest.mark.slow
def test_a_node_and_a_larger_batch_train_more_tokens_a_second():
    given = job(model(), num_nodes=1, batch_size=8)
    _, changes = changes_of(given)
    changes = list(changes)
    words = [change.what for change in changes]
    assert words[1] == "With 2 nodes instead of 1 and the same batch"
    assert changes[1].gain > 0.1
    assert words[-1] == "With batches of 16 examples instead of 8" and changes[-1].gain > 0


def test_where_the_batch_does_not_divide_one_as_large_for_each_rank_is_tried_too():
    """4 replicas have an example each; so many more have none."""
    _, changes = changes_of(job(model(), num_nodes=1, batch_size=4), Pins(strategies=(DATA_PARALLEL,), tp=1))
    changes = list(changes)
    words = [change.what for change in changes]
    assert words[1] == "With 2 nodes instead of 1 and the same batch" and changes[1].gain < 0.005
    assert words[2] == "With 2 nodes instead of 1 and batches of 8" and changes[2].gain > 0.3


def test_a_change_that_is_too_large_to_simulate_is_left_out(monkeypatch):
    """The largest job that can be planned: it has no larger batch, and no further node."""
    given = job(model(), num_nodes=1, batch_size=4)
    monkeypatch.setattr("motet.core.limits.MAX_EXAMPLES_TIMES_RANKS", given.batch_size * given.cluster.num_ranks)
    _, changes = changes_of(given, Pins(strategies=(DATA_PARALLEL,), tp=1))
    assert [change.what.split(",")[0] for change in changes] == ["With 2 times the memory"]


def test_replicas_that_share_long_sequences_come_first_where_there_are_any():
    """One example is several times as long as the others. Who pins a way of balancing is told nothing of others."""
    pins = Pins(strategies=(CHAIN,), tp=1, pp=2, dp=2, microbatch_size=1)
    words, memory = "With sequences cut over replicas (--pin balance=split)", "With 2 times the memory"
    long = job(num_nodes=1, batch_size=8, spread=2.0)
    found, changes = changes_of(long, pins)
    best, first = found.best.candidate, next(changes)
    split_s = predict_candidate(long, replace(best, plan=replace(best.plan, balance="split"))).step_s
    assert first.what == words and first.gain == pytest.approx(found.best.prediction.step_s / split_s - 1)
    pinned = replace(found, pins=replace(pins, balance="off"))
    assert next(what_if(pinned, STRATEGIES)).what.startswith(memory)


def test_a_job_in_fp32_is_told_what_bf16_gains():
    """Products are ten times as fast, and halves of memory and messages are saved."""
    given = job(num_nodes=1, batch_size=8)
    cluster = replace(given.cluster, device=replace(given.cluster.device, peak_flops={"bf16": 2e13, "fp32": 2e12}))
    in_fp32 = replace(given, cluster=cluster, precision="fp32", cost=Analytic(cluster, "fp32"))
    pins = Pins(strategies=(DATA_PARALLEL,), tp=1)
    found, changes = changes_of(in_fp32, pins)
    first = next(changes)
    assert first.what.startswith('In bf16 instead of fp32 (fsdp.param_dtype = "bfloat16"')
    in_bf16 = search(replace(given, cluster=cluster), STRATEGIES, pins, max_simulated=4).best.prediction
    assert first.gain == pytest.approx(in_bf16.tokens_per_s / found.best.prediction.tokens_per_s - 1)
    assert 4 < first.gain < 9.1
    quota = Quota(1, lambda plan: plan.precision == "fp32")  # As `--trainable` has it.
    assert next(what_if(found, STRATEGIES, quota)).gain == first.gain
    assert "bf16" not in next(changes_of(job(num_nodes=1, batch_size=8), pins)[1]).what


def test_gains_in_words():
    assert str(Change("With x", 0.0009)) == "With x: no gain was found."
    assert str(Change("With x", 0.0409, "TP 2")) == "With x: at least 4.1% more tokens a second, by TP 2."
    assert str(Change("With x", 0.0409)) == "With x: at least 4.1% more tokens a second."


def test_only_small_jobs_are_planned_anew_without_being_asked():
    assert is_quick(job())
    assert not is_quick(job(batch_size=2048)) and not is_quick(job(num_nodes=17))
