"""Plans of models with LoRA adapters equal one process: pipelines, ZeRO, W apart, bubbles, tp, cp, and dropout."""

from dataclasses import replace

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers

ALL = {"image": 3, "audio": 2, "backbone": 3}
CUT = {"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}
LORA = ("image", "audio", "backbone")


def chain(*stages, **options):
    return (Unit("all", stages, pp=len(stages), **{"zero": 0, **options}),)


BESIDE = (
    Unit("image", ({"image": 3},), zero=0),
    Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=1, zero=0),
)
CASES = [
    PlannedCase(chain(*CUT), lora=LORA, tied=True),
    PlannedCase(chain(*CUT), "zb_h1", lora=LORA, dropout=0.2),
    PlannedCase(BESIDE, lora=("image", "backbone"), frozen=("audio",), microbatch_size=2),
    PlannedCase(chain(*CUT, recompute=({"image": 2, "backbone": 1}, {"backbone": 1})), lora=LORA, dropout=0.2),
    PlannedCase(chain(ALL, dp=2, zero=3), lora=("backbone *_proj",), frozen=("image", "*.lora_A.*")),
    PlannedCase(chain(ALL, dp=2, zero=2), lora=LORA, contents=()),
    PlannedCase(chain(ALL, cp=2), lora=("backbone",), dropout=0.2),
    PlannedCase(chain(ALL, tp=2), lora=LORA, dropout=0.2),
    PlannedCase(chain(ALL, tp=2, recompute=({"image": 2, "backbone": 2},)), lora=("backbone o_proj",), dropout=0.2),
    PlannedCase(chain(ALL, tp=2), lora=("backbone",), family="phi3", dropout=0.2, microbatch_size=2),
    PlannedCase(chain(ALL, tp=2), lora=LORA, family="olmo2"),
    PlannedCase(chain(ALL, tp=2), lora=("backbone",), family="gpt2", dropout=0.2),
]
ON_KEYS = [
    PlannedCase(units, parts=("keys",), lora=("backbone",), dropout=0.2, microbatch_size=2, **options)
    for units, options in (
        (chain(*CUT, recompute=({"image": 2, "backbone": 1}, {"backbone": 1})), {}),
        (chain(*CUT), {"schedule": "zb_h1"}),
        (chain(ALL, cp=2), {"left_out": 0.3}),
        (chain(ALL, tp=2, recompute=({"backbone": 2},)), {}),
    )
]
"""Images are keys of a block, whose adapters drop out of what they read of both."""


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: CASES}, {2: (1, 7)}))
def test_two_ranks(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: ON_KEYS}, {2: (2,)}))
def test_adapters_of_blocks_that_attend_to_images_beside_the_sequence(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
def test_four_ranks():
    whole = PlannedCase(chain(ALL, dp=4, zero=3), family="phi3", lora=("backbone",), batch_size=8)
    assert_planned(
        4,
        [
            PlannedCase(chain(*CUT, tp=2), "zb_h1", lora=LORA, family="qwen3", tied=True),
            PlannedCase(chain(ALL, tp=2, dp=2, zero=3), lora=LORA, dropout=0.2),
            PlannedCase(chain(ALL, tp=2, dp=2, zero=2), family="phi3", lora=("backbone",), batch_size=8, then=whole),
            PlannedCase(chain(*CUT, cp=2), lora=("backbone",), microbatch_size=2),
            PlannedCase(chain(*CUT, tp=2), "zb_h1", lora=("backbone",), family="gpt2", chunks=2),
            PlannedCase(
                chain(ALL, tp=2, dp=2, zero=2),
                family="gpt2",
                lora=("backbone",),
                batch_size=8,
                then=replace(whole, family="gpt2"),
            ),
        ],
    )
