"""`decide_step`: which microbatch computes each example of a step."""

import numpy as np
import pytest

from motet.assign.orchestrator import Orchestrator
from motet.assign.whole_step import decide_step
from motet.balance import LengthWork, Link, StepTimes
from motet.core.workload import BACKBONE, BatchLengths, home_ranks
from unit.assign.test_orchestrator import COSTS, draw_lengths

TIMES = StepTimes(lambda lengths: dict.fromkeys(COSTS, 1e-3), Link(1e12, 0.0), token_bytes=8)


def orchestrator(balanced=tuple(COSTS), **options):
    return Orchestrator(COSTS, 2, balanced, **{"times": TIMES, "defers": True} | options)


def test_every_example_is_in_one_microbatch_with_its_own_lengths():
    lengths = draw_lengths(0, 24, 2)
    step = decide_step(orchestrator(), lengths, 4)
    assert step.method == "defer" and step.why.startswith("defer: ")
    assert step.predicted_s["defer"] < step.predicted_s["stay"]
    assert sorted(np.concatenate([part.examples for part in step.microbatches])) == list(range(24))
    for part in step.microbatches:
        np.testing.assert_array_equal(part.lengths.sequence, lengths.sequence[part.examples])
        for phase, placed in part.decision.assignments.items():
            assert placed.num_items == part.lengths.of(phase).num_items
        assert part.decision.before[BACKBONE].num_items == len(part.examples)


@pytest.mark.parametrize(
    "kept", [orchestrator(defers=False), orchestrator(times=None), orchestrator((BACKBONE,)), orchestrator(())]
)
def test_otherwise_each_microbatch_is_decided_as_it_comes(kept):
    count = 4
    lengths = draw_lengths(3, 24, 2)
    lengths = BatchLengths(lengths.sequence, lengths.num_targets, np.tile(home_ranks(6, 2), count), lengths.items)
    step = decide_step(kept, lengths, count)
    assert (step.method, step.why, step.predicted_s) == ("", "", {})
    for number, part in enumerate(step.microbatches):
        assert part.examples.tolist() == list(range(6 * number, 6 * number + 6))
        alone = kept.decide(lengths.take(part.examples))
        assert part.decision.method == alone.method
        for phase, placed in alone.assignments.items():
            np.testing.assert_array_equal(part.decision.assignments[phase].items, placed.items)


def test_one_microbatch_is_not_compared():
    assert decide_step(orchestrator(), draw_lengths(0, 8, 2), 1).method == ""


def test_microbatches_that_do_not_divide_the_examples():
    with pytest.raises(ValueError, match="4 microbatches do not divide 9 examples"):
        decide_step(orchestrator(), draw_lengths(0, 9, 2), 4)


@pytest.mark.parametrize("balanced", [(BACKBONE,), tuple(COSTS)], ids=["as it comes", "compared"])
def test_a_phase_that_is_missing(balanced):
    lengths = draw_lengths(0, 8, 2)
    backbone_alone = BatchLengths(lengths.sequence, lengths.num_targets, lengths.home, {})
    with pytest.raises(ValueError, match="differ in"):
        decide_step(orchestrator(balanced), backbone_alone, 2)


def test_work_is_counted_once_and_is_that_of_each_microbatch():
    calls = []

    class Counted(LengthWork):
        def __call__(self, lengths):
            calls.append(lengths)
            return super().__call__(lengths)

    step = decide_step(orchestrator(work=Counted()), draw_lengths(0, 24, 2), 4)
    assert step.method == "defer" and len(calls) == 1
    for part in step.microbatches:
        for phase, work in LengthWork()(part.lengths).items():
            np.testing.assert_array_equal(part.decision.work[phase], work)
