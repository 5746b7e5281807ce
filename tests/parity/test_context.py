"""Units with context-parallel ranks equal one process."""

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned

ENCODERS = Unit("encoders", ({"image": 3, "audio": 2},), cp=2, zero=1)
CUT = Unit("encoders", ({"image": 2}, {"image": 1, "audio": 2}), pp=2, cp=2, zero=0, recompute=({"image": 1}, {}))
OF_ENCODERS = {
    3: [
        PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), microbatch_size=2),
        PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), left_out=0.5, dropout=0.2),
    ],
    4: [PlannedCase((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2, dp=2, zero=2)), batch_size=4)],
    5: [PlannedCase((CUT, Unit("llm", ({"backbone": 3},), first_rank=4)), "gpipe", microbatch_size=3)],
}
"""Encoders whose items are dealt out over the ranks of a replica, beside a backbone."""


@pytest.mark.parametrize("num_ranks", OF_ENCODERS)
def test_encoders_that_share_items_equal_one_process(num_ranks):
    assert_planned(num_ranks, OF_ENCODERS[num_ranks])
