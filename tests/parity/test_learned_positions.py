"""Backbones whose positions are learned, and Granite's scales, equal one process under Plans."""

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned

WHOLE = {"image": 3, "audio": 2, "backbone": 3}
CUT = {"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}


def chain(*stages, **options):
    return (Unit("all", stages, pp=len(stages), **{"zero": 0, **options}),)


def test_stages_shared_sequences_and_shared_products():
    families = ("granite", "gpt2", "opt")
    assert_planned(
        2,
        [
            *(PlannedCase(chain(*CUT), "zb_h1", family=name, tied=name != "opt", dropout=0.2) for name in families),
            *(PlannedCase(chain(WHOLE, cp=2), family=name, parts=("ahead",)) for name in families),
            *(PlannedCase(chain(WHOLE, tp=2), family=name, tied=name == "opt") for name in ("granite", "opt")),
            PlannedCase(chain(WHOLE, dp=2, zero=3), family="gpt2", contents=("audio",)),
        ],
    )
