"""Backbones whose positions are learned, and Granite's scales, equal one process under Plans."""

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers

WHOLE = {"image": 3, "audio": 2, "backbone": 3}
CUT = {"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}


def chain(*stages, **options):
    return (Unit("all", stages, pp=len(stages), **{"zero": 0, **options}),)


FAMILIES = ("granite", "gpt2", "opt")
CASES = [
    *(PlannedCase(chain(*CUT), "zb_h1", family=name, tied=name != "opt", dropout=0.2) for name in FAMILIES),
    *(PlannedCase(chain(WHOLE, cp=2), family=name, parts=("ahead",)) for name in FAMILIES),
    *(PlannedCase(chain(WHOLE, tp=2), family=name, tied=name == "opt") for name in FAMILIES),
    PlannedCase(chain(WHOLE, tp=2), family="gpt2", tied=True, dropout=0.2, chunks=2),
    PlannedCase(chain(WHOLE, dp=2, zero=3), family="gpt2", contents=("audio",)),
    PlannedCase(chain(WHOLE, tp=2, zero=1), family="gpt2", then=PlannedCase(chain(WHOLE, dp=2, zero=3), family="gpt2")),
]
IN_V = (Unit("all", ({"image": 3}, {"audio": 2, "backbone": 1}, {"backbone": 1}, {"backbone": 1}), pp=2, tp=2),)
OF_FOUR = [
    PlannedCase(chain(*CUT, tp=2, zero=1), "zb_h1", family="gpt2", tied=True, dropout=0.2),
    PlannedCase(IN_V, "zb_v", family="gpt2", chunks=2),
    PlannedCase(chain(WHOLE, tp=2, cp=2), family="gpt2", dropout=0.2),
    PlannedCase(chain(WHOLE, tp=2, dp=2, zero=3), family="gpt2", then=PlannedCase(chain(*CUT, dp=2), family="gpt2")),
    PlannedCase(chain(*CUT, dp=2), family="gpt2", then=PlannedCase(chain(WHOLE, tp=2, dp=2, zero=2), family="gpt2")),
    PlannedCase(chain(WHOLE, tp=2, dp=2, zero=2), "data_parallel", family="gpt2", tied=True),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: CASES}, {2: (1, 6)}))
def test_stages_shared_sequences_and_shared_products(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
def test_four_ranks_of_gpt2():
    assert_planned(4, OF_FOUR)
