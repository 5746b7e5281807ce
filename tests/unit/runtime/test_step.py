import pytest

from motet.core.timeline import Timeline
from motet.runtime.step import MadeRows, StepResult


def result(totals, num_targets, made):
    return StepResult(
        step=0,
        num_targets=num_targets,
        num_tokens=9,
        num_examples=2,
        moved_bytes=0,
        crossing_bytes=0,
        sent_bytes={},
        timeline=Timeline.of([]),
        _totals=totals,
        made={name: MadeRows(number, weight) for name, (number, weight) in made.items()},
    )


@pytest.mark.parametrize(
    ("totals", "num_targets", "rows", "losses", "loss"),
    [
        ([1.0, 6.0, 3.0, 8.0], 3, 4, {"backbone": 2.0, "draw": 2.0}, 3.0),
        ([1.0, 6.0, 3.0, 0.0], 3, 0, {"backbone": 2.0, "draw": 0.0}, 2.0),
        ([1.0, 0.0, 0.0, 8.0], 0, 4, {"backbone": 0.0, "draw": 2.0}, 1.0),
        ([0.0, 0.0, 0.0, 0.0], 0, 0, {"backbone": 0.0, "draw": 0.0}, 0.0),
    ],
)
def test_a_step_says_whether_it_has_a_loss(totals, num_targets, rows, losses, loss):
    of_step = result(totals, num_targets, {"draw": (rows, 0.5)})
    assert (of_step.losses, of_step.loss, of_step.is_finite) == (losses, loss, True)
    assert of_step.has_loss == (num_targets + rows > 0)
