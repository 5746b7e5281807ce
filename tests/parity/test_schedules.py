"""Schedules with several stages a rank, or with backward in two halves, equal one process: float64 to 1e-10.

Each variant runs under each schedule on 2 or on 3 ranks; benchmarks/fuzz_plans.py draws every schedule with everything.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from motet.core.plan import Unit
from motet.runtime import planned_step
from parity.planned import PlannedCase, assert_planned, run_planned
from parity.test_planned import chain
from ranks import RankFailed, run_ranks


def on_ranks(num_ranks, *stages, **options):
    """A chain with several stages a rank."""
    (unit,) = chain(*stages, **options)
    return (replace(unit, pp=num_ranks),)


NAMES = {"i": "image", "a": "audio", "b": "backbone"}
FOUR = {"i": 2}, {"i": 1, "a": 1}, {"a": 1, "b": 1}, {"b": 2}
SIX = {"i": 2}, {"i": 1}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}
CUTS = {
    ("interleaved_1f1b", 2): FOUR,
    ("interleaved_1f1b", 3): SIX,
    ("zb_v", 2): FOUR,
    ("zb_v", 3): SIX,
    ("zb_h1", 2): ({"i": 3, "a": 1}, {"a": 1, "b": 3}),
    ("zb_h1", 3): ({"i": 3}, {"a": 2, "b": 1}, {"b": 2}),
}
BESIDE = (
    Unit("image", ({"image": 3},), first_rank=0, zero=0),
    Unit("llm", ({"audio": 2}, {"backbone": 1}, {"backbone": 1}, {"backbone": 1}), first_rank=1, pp=2, zero=0),
)
REPLICAS = [
    PlannedCase(on_ranks(2, *FOUR, dp=2), "interleaved_1f1b", example_order="both", microbatch_size=2, batch_size=12),
    PlannedCase(on_ranks(2, *FOUR, dp=2, zero=1), "interleaved_1f1b", tied=True, frozen=("image encoder",)),
    PlannedCase(on_ranks(2, *FOUR, dp=2, zero=2), "zb_v", example_order="inter", blocking=True, batch_size=12),
    PlannedCase(on_ranks(2, *FOUR, dp=2, zero=3), "zb_v", frozen=("image encoder",), tied=True),
    PlannedCase(on_ranks(2, *CUTS["zb_h1", 2], dp=2, zero=3, recompute=({"image": 2}, {"backbone": 1})), "zb_h1"),
]
ENDS_TOGETHER = [
    PlannedCase(on_ranks(1, {"i": 3, "a": 2, "b": 1}, {"b": 2}, dp=2), "zb_v", tied=True),
    PlannedCase(on_ranks(1, {"i": 2}, {"i": 1, "a": 2, "b": 3}, dp=2), "interleaved_1f1b", frozen=("image",)),
]
"""A rank has both ends of a tied embedding, or of an encoder."""
NUM_RANDOM = 3
"""Random cases a number of ranks. Their seeds are 0 to NUM_RANDOM - 1; `random_case` makes one again."""


def cases_of(schedule, num_ranks, **options):
    stages = CUTS[schedule, num_ranks]
    plain = PlannedCase(on_ranks(num_ranks, *stages), schedule, batch_size=5, **options)
    recompute = tuple({NAMES[key]: 1 for key in stage} for stage in stages)
    return [
        plain,
        replace(plain, tied=True, microbatch_size=2, batch_size=8),
        replace(plain, frozen=("image encoder",), contents=("audio",), blocking=True),
        replace(plain, frozen=("image", "audio")),
        replace(plain, frozen=("backbone",)),
        replace(plain, units=on_ranks(num_ranks, *stages, recompute=recompute), frozen=("audio",), tied=True),
        replace(plain, contents=(), batch_size=2),
    ]


def random_case(seed, num_ranks):
    """Any cut, with any blocks recomputed, anything frozen, on any mixture of media."""
    rng = np.random.default_rng((seed, num_ranks))
    dp = 2 if num_ranks == 4 else 1
    schedule = str(rng.choice(["interleaved_1f1b", "zb_h1", "zb_v"]))
    num_stages = num_ranks // dp * (1 if schedule == "zb_h1" else 2)
    blocks = [*["image"] * 3, *["audio"] * 2, *["backbone"] * 3]
    cuts = [0, *sorted(rng.choice(np.arange(1, len(blocks)), num_stages - 1, replace=False).tolist()), len(blocks)]
    stages = tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))
    recompute = tuple({name: int(rng.integers(0, count + 1)) for name, count in stage.items()} for stage in stages)
    recompute, zero = recompute if rng.random() < 0.5 else (), int(rng.integers(0, 4))
    unit = Unit("all", stages, pp=num_ranks // dp, dp=dp, zero=zero, recompute=recompute)
    microbatch_size = int(rng.integers(1, 3))
    frozen = rng.choice(["image encoder", "image", "audio", "backbone"], rng.integers(0, 3), replace=False)
    return PlannedCase(
        (unit,),
        schedule,
        batch_size=dp * microbatch_size * int(rng.integers(1, 6)),
        microbatch_size=microbatch_size,
        frozen=tuple(map(str, frozen)),
        tied=bool(rng.random() < 0.5),
        contents=tuple(name for name in ("image", "audio") if rng.random() < 0.7),
        blocking=bool(rng.random() < 0.5),
        deferred_warmup=schedule == "interleaved_1f1b" and bool(rng.random() < 0.5),
        seed=seed,
    )


@pytest.mark.parametrize("deferred", [pytest.param(False, marks=pytest.mark.slow), True], ids=["early", "deferred"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_interleaved_steps_equal_one_process(num_ranks, deferred):
    cases = cases_of("interleaved_1f1b", num_ranks, deferred_warmup=deferred)[(num_ranks + deferred) % 2 :: 2]
    if num_ranks == 3:
        cases.append(PlannedCase(BESIDE, "interleaved_1f1b", deferred_warmup=deferred))
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_with_backward_in_two_halves_equal_one_process(num_ranks, schedule):
    assert_planned(num_ranks, cases_of(schedule, num_ranks)[(num_ranks + (schedule == "zb_v")) % 2 :: 2])


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, ENDS_TOGETHER), pytest.param(4, REPLICAS, marks=pytest.mark.slow)]
)
def test_replicas_with_several_stages_a_rank_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_cases_equal_one_process(num_ranks):
    assert_planned(num_ranks, [random_case(seed, num_ranks) for seed in range(NUM_RANDOM)])


def leave_one_out(rank, num_ranks, case):
    """A step in which W of stage 1 and microbatch 2 leaves its products where they are."""
    whole = planned_step._RunningPlan.backward_weight

    def but_one(running, action):
        if (action.stage, action.microbatch) != (1, 2):
            whole(running, action)

    planned_step._RunningPlan.backward_weight = but_one
    run_planned(case)


@pytest.mark.parametrize(("dp", "where"), [(1, "end"), (2, "reduce")])
def test_gradients_of_weights_that_still_wait_end_the_run(dp, where):
    case = PlannedCase(on_ranks(2, *CUTS["zb_h1", 2], dp=dp), "zb_h1", batch_size=4 * dp)
    with pytest.raises(RankFailed, match=rf"in {where}\n(.|\n)*RuntimeError: 1W2 has not run; gradients of weights"):
        run_ranks(leave_one_out, 2 * dp, case)
