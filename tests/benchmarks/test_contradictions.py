"""The benchmark of contradictions: on a job of two ranks there are none, and what would be one is counted."""

import pytest

from benchmark import benchmark


@pytest.fixture(scope="module")
def programs():
    with benchmark("contradictions") as contradictions:
        yield contradictions


@pytest.mark.slow
def test_neither_a_pin_nor_more_of_a_thing_contradicts_the_free_answer(programs, monkeypatch):
    kept = ("schedule=interleaved_1f1b",)
    monkeypatch.setattr(programs, "PINS", {name: programs.PINS[name] for name in kept})
    all_more = programs.more
    monkeypatch.setattr(programs, "more", lambda cluster: {"links x 2": all_more(cluster)["links x 2"]})
    job = programs.random_job(2, 0, programs.workload_at(None))
    found = programs.compared(2, job)
    assert [one.what for one in found] == [*kept, "links x 2"]
    assert all(one.excess == 0 and one.free_s < float("inf") for one in found)
    assert all(row.met for row in programs.rows_of(found))


def test_contradictions_are_counted_by_kind(programs):
    ones = [
        programs.Compared(1, "", "tp=1", 1.0, 0.8, 0.25, ""),
        programs.Compared(1, "", "tp=2", 1.0, 1.1, 0.0, ""),
        programs.Compared(1, "", "links x 2", 1.0, 1.1, 0.1, ""),
    ]
    rows = {row.name: row for row in programs.rows_of(ones)}
    assert rows["answers where a pin finds a faster Plan, of 2"].value == 1
    assert rows["the most by which links x 2 makes the answer slower"].value == 0.1
    assert not any(row.met for name, row in rows.items() if name != "jobs")


@pytest.mark.slow
def test_a_descent_within_a_shape_finds_what_a_pin_of_the_shape_would(programs, monkeypatch):
    """Replicas of one pipeline rank, which no strategy proposes with so large microbatches."""
    job, strategies = programs.random_job(47, 0, programs.workload_at(None)), ("data parallel", "chain")
    chosen = {name: one for name, one in programs.STRATEGIES.items() if name in strategies}
    found = programs.search(job, chosen).best
    monkeypatch.setattr("motet.planner.refinement.Refinement._within_shapes", lambda self, results: results)
    assert found.prediction.step_s < 0.95 * programs.search(job, chosen).best.prediction.step_s
