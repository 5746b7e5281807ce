"""Each optimizer of torch under Plans: ZeRO stages, stages, divided layers, and a run that goes on under another Plan
from a checkpoint.
"""

import pytest

from motet.train.optimizers import OPTIMIZERS
from parity.planned import PlannedCase, assert_planned
from parity.test_planned import chain
from tiers import in_tiers

ALL, STAGES = {"i": 3, "a": 2, "b": 3}, ({"i": 3, "a": 2, "b": 1}, {"b": 2})
PAIRS = [
    (chain(ALL, dp=2, zero=0), chain(ALL, dp=2, zero=3)),
    (chain(ALL, dp=2, zero=1), chain(*STAGES)),
    (chain(*STAGES), chain(ALL, dp=2, zero=2)),
    (chain(ALL, dp=2, zero=3), chain(ALL, tp=2)),
]
OF_FOUR_RANKS = chain(*STAGES, dp=2, zero=1), chain(ALL, tp=2, dp=2, zero=3)


def goes_on(name, first, second):
    """Two Plans, one behind the other."""
    return PlannedCase(first, batch_size=4, optimizer=name, then=PlannedCase(second, batch_size=4, optimizer=name))


NAMES = sorted(set(OPTIMIZERS) - {"adamw"})  # All other cases have that one.
CASES = [goes_on(name, *PAIRS[number % len(PAIRS)]) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: CASES}, {2: (3,)}))
def test_each_equals_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
def test_updates_of_dtensors_as_torch_makes_them_equal_one_process():
    """The way of users; all other cases update rows at once (`parity.updates`)."""
    assert_planned(4, [goes_on(name, *OF_FOUR_RANKS) for name in ("adamw", "radam")], is_torchs=True)
