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
    *(PlannedCase(chain(WHOLE, tp=2), family=name, tied=name == "opt") for name in ("granite", "opt")),
    PlannedCase(chain(WHOLE, dp=2, zero=3), family="gpt2", contents=("audio",)),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: CASES}, {2: (1, 6)}))
def test_stages_shared_sequences_and_shared_products(num_ranks, cases):
    assert_planned(num_ranks, cases)
