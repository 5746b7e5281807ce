"""Plans of data parallelism whose ranks share products (`tp`) equal one process: FSDP2 over the part of each rank.

benchmarks/fuzz_plans.py draws such Plans, too: one in ten of its cases.
"""

from dataclasses import replace

import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers

ALL = {"image": 3, "audio": 2, "backbone": 3}


def divided(**options):
    """One unit of all modules, each of whose replicas is two tensor-parallel ranks."""
    return (Unit("all", (ALL,), **{"tp": 2, "zero": 3, **options}),)


def case(units=None, **options):
    return PlannedCase(units or divided(), "data_parallel", **options)


RECOMPUTED = divided(dp=2, recompute=({"image": 2, "audio": 1, "backbone": 2},))
CASES_ALONE = [
    case(),
    case(divided(zero=0), family="qwen3", tied=True),
    case(family="phi3", contents=("image",)),
]
CASES_OF_REPLICAS = [
    # Parameters are whole, gathered once, kept behind forward, or freed; of some replicas or all.
    *(case(divided(dp=2, zero=zero), family="qwen3", tied=zero == 1) for zero in (0, 1, 2, 3)),
    case(divided(dp=2, zero=3, shard_size=1), microbatch_size=3),
    case(RECOMPUTED, balance="per_phase"),
    case(RECOMPUTED, balance="joint", is_mixed=True),
    case(divided(dp=2), frozen=("image encoder", "audio"), balance="auto"),
    case(divided(dp=2), frozen=("backbone",), contents=("audio",)),
    case(divided(dp=2), lora=("image", "backbone"), frozen=("*norm*",)),
    case(divided(dp=2), dropout=0.2, balance="per_phase", batch_size=8, left_out=0.3),
    case(divided(dp=2), family="olmo2", chunks=2),
    case(divided(dp=2), family="mixtral", batch_size=2),
    case(divided(dp=2), balance="auto", nodes=(1, 3)),
    # Stopped under one Plan, gone on under another.
    case(divided(dp=2), then=PlannedCase((Unit("all", (ALL,), dp=4, zero=3),), "data_parallel")),
    replace(
        PlannedCase((Unit("all", ({"image": 3, "audio": 2}, {"backbone": 3}), pp=2, tp=2, zero=0),)),
        then=case(divided(dp=2, zero=2)),
    ),
]


CASES_OF_FROZEN_BLOCKS = [
    # A callback before the frozen encoder learns: ranks without images run its blocks backward, too.
    case(divided(tp=1, dp=3), frozen=("image encoder",), parts=("tiles",), batch_size=3, microbatch_size=1),
    # The output layer learns behind frozen blocks: ranks whose examples are left out run none of them backward.
    case(divided(tp=1, dp=3), frozen=("*embed_tokens*", "*layers*", "image", "audio"), batch_size=3, left_out=0.5),
]
"""FSDP gathers frozen blocks for their backward pass, which all ranks or none must have."""
CASES_OF_UNLIKE_NODES = [
    # One rank of a node, and two or three of the next.
    case(divided(tp=1, dp=3), balance="per_phase", nodes=(1, 2)),
    case(divided(tp=1, dp=3), balance="joint", nodes=(2, 3), microbatch_size=2),
]
CASES = {2: CASES_ALONE, 3: CASES_OF_FROZEN_BLOCKS + CASES_OF_UNLIKE_NODES, 4: CASES_OF_REPLICAS}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: (0,), 3: (0, 2), 4: (3, 9)}))
def test_ranks_that_share_products_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)
