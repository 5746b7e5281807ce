"""A step under a Plan with stages equals one process: float64 to 1e-10, loss, norm, gradients and weights.

benchmarks/fuzz_plans.py draws more of them.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers


def chain(*stages, **options):
    """One unit that runs all modules in a chain. stages: module -> blocks, by the modules' first letters."""
    names = {"i": "image", "s": "second", "a": "audio", "b": "backbone"}
    spans = tuple({names[key]: count for key, count in stage.items()} for stage in stages)
    return (Unit("all", spans, pp=len(stages), **{"zero": 0, **options}),)


TWO = chain({"i": 3, "a": 1}, {"a": 1, "b": 3})
CUT = chain({"i": 3, "a": 2, "b": 1}, {"b": 2})
THREE = chain({"i": 2}, {"i": 1, "a": 2, "b": 1}, {"b": 2})
CASES = [
    PlannedCase(TWO),
    PlannedCase(TWO, "gpipe"),
    PlannedCase(TWO, blocking=True),
    PlannedCase(CUT, tied=True),
    PlannedCase(CUT, frozen=("image", "audio")),
    PlannedCase(chain({"i": 3, "a": 2}, {"b": 3}), frozen=("image", "audio")),  # Rank 0 updates nothing.
    PlannedCase(chain({"i": 3, "a": 2}, {"b": 3}), frozen=("image", "backbone")),  # Rank 1 updates nothing.
    PlannedCase(CUT, caps={"backbone": 80, "image": 30}, microbatch_size=2),
    PlannedCase(TWO, frozen=("image encoder",)),
    PlannedCase(TWO, frozen=("backbone",)),
    PlannedCase(TWO, contents=()),
    PlannedCase(TWO, contents=("audio",), microbatch_size=2),
    PlannedCase(TWO, example_order="both", microbatch_size=2, batch_size=12),
    PlannedCase(chain({"i": 3, "a": 1}, {"a": 1, "b": 3}, recompute=({"image": 2, "audio": 1}, {"backbone": 2}))),
    PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}, recompute=({"image": 3, "backbone": 1}, {"backbone": 2}))),
]
BESIDE = (
    Unit("image", ({"image": 3},), first_rank=0),
    Unit("audio", ({"audio": 2},), first_rank=1),
    Unit("llm", ({"backbone": 3},), first_rank=2),
)
CASES_OF_3 = [
    PlannedCase(BESIDE),
    PlannedCase(BESIDE, "gpipe", frozen=("image",), microbatch_size=2),
    PlannedCase(THREE),
    PlannedCase(THREE, "gpipe", frozen=("image encoder",), tied=True),
    PlannedCase(THREE, blocking=True, frozen=("backbone",)),
]
CHAINS_OF_2 = chain({"i": 3, "a": 2}, {"b": 3}, dp=2)
CASES_OF_4 = [
    PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}, dp=2), tied=True),
    PlannedCase(chain({"i": 2}, {"i": 1, "a": 2, "b": 3}, dp=2), "gpipe", batch_size=8, microbatch_size=2),
    PlannedCase(CHAINS_OF_2, example_order="inter", batch_size=8, caps={"backbone": 80, "image": 30}),
    PlannedCase(
        (
            Unit("image", ({"image": 3},), first_rank=0, dp=2, zero=0),
            Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=2, dp=2, zero=0),
        )
    ),
]
CUT_BY_2 = {"i": 3, "a": 2, "b": 1}, {"b": 2}
SHARED = [
    PlannedCase(chain(*CUT_BY_2, dp=2, zero=1), tied=True),
    PlannedCase(chain(*CUT_BY_2, dp=2, zero=2), frozen=("image encoder",)),
    PlannedCase(chain(*CUT_BY_2, dp=2, zero=3), tied=True, frozen=("image",), blocking=True),
    PlannedCase(chain(*CUT_BY_2, dp=2, zero=3, recompute=({"image": 2, "backbone": 1}, {"backbone": 1})), "gpipe"),
    PlannedCase(chain(*CUT_BY_2, dp=2, zero=1), contents=(), microbatch_size=2, batch_size=8),
    PlannedCase(
        (
            Unit("image", ({"image": 3},), first_rank=0, dp=2, zero=1),
            Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=2, dp=2, zero=3),
        ),
        contents=("audio",),
    ),
    *(PlannedCase(chain({"i": 3, "a": 2, "b": 3}, dp=4, zero=zero, shard_size=2), batch_size=8) for zero in (1, 3)),
]
"""ZeRO 1 to 3 on two replicas, and hybrid sharding on four."""
NUM_RANDOM = 3
"""Random cases a number of ranks. Their seeds are 0 to NUM_RANDOM - 1; `random_case` makes one again."""


def random_case(seed, num_ranks):
    """Any chain: cut anywhere, shared by any ZeRO, any blocks recomputed, anything frozen, any mixture of media."""
    rng = np.random.default_rng((seed, num_ranks))
    dp = 2 if num_ranks == 4 else 1
    counts = {"image": 3, "audio": 2, "backbone": 3}
    blocks = [name for name, count in counts.items() for _ in range(count)]
    cuts = [0, *sorted(rng.choice(np.arange(1, len(blocks)), num_ranks // dp - 1, replace=False).tolist()), len(blocks)]
    stages = tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))
    recompute = tuple({name: int(rng.integers(0, count + 1)) for name, count in stage.items()} for stage in stages)
    microbatch_size = int(rng.integers(1, 3))
    recompute = recompute if rng.random() < 0.5 else ()
    zero = int(rng.integers(0, 4))
    unit = Unit("all", stages, pp=len(stages), dp=dp, zero=zero, recompute=recompute)
    frozen = rng.choice(["image encoder", "image", "audio", "backbone"], rng.integers(0, 3), replace=False)
    return PlannedCase(
        (unit,),
        str(rng.choice(["gpipe", "1f1b"])),
        batch_size=dp * microbatch_size * int(rng.integers(1, 5)),
        microbatch_size=microbatch_size,
        frozen=tuple(map(str, frozen)),
        tied=bool(rng.random() < 0.5),
        contents=tuple(name for name in ("image", "audio") if rng.random() < 0.7),
        blocking=bool(rng.random() < 0.5),
        seed=seed,
    )


BY_RANKS = {2: CASES, 3: CASES_OF_3, 4: CASES_OF_4}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(BY_RANKS, {2: (0, 3, 14), 3: (0, 3), 4: (2,)}))
def test_steps_under_a_plan_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: SHARED}, {4: (2,)}))
def test_steps_with_shared_state_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))])
def test_random_plans_equal_one_process(num_ranks):
    cases = [random_case(seed, num_ranks) for seed in range(NUM_RANDOM)]
    assert_planned(num_ranks, cases)
