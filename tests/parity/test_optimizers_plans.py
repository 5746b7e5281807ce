"""Each optimizer of torch under Plans with stages: every ZeRO stage, divided layers, and a run that goes on under
another Plan from a checkpoint.
"""

from motet.train.optimizers import OPTIMIZERS
from parity.planned import PlannedCase, assert_planned
from parity.test_planned import chain

STAGES = ({"i": 3, "a": 2, "b": 1}, {"b": 2})
ZERO = [chain(*STAGES, dp=2, zero=zero) for zero in range(4)]
DIVIDED = chain({"i": 3, "a": 2, "b": 3}, tp=2, dp=2, zero=3)
PAIRS = [(ZERO[0], ZERO[3]), (ZERO[1], ZERO[2]), (ZERO[3], DIVIDED)]


def test_each_equals_one_process():
    names = sorted(set(OPTIMIZERS) - {"adamw"})  # All other cases have that one.
    cases = [
        PlannedCase(first, batch_size=4, optimizer=name, then=PlannedCase(second, batch_size=4, optimizer=name))
        for number, name in enumerate(names)
        for first, second in [PAIRS[number % len(PAIRS)]]
    ]
    assert_planned(4, cases)
