"""Units with other numbers of replicas than the backbone equal one process: float64 to 1e-10, as in test_planned.py.

Replicas of an encoder share items, so that shares are ragged, or empty. benchmarks/fuzz_plans.py draws such units, too.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from motet.core.plan import Unit
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers


def pair(encoders, backbone, *, encoder_stages=({"image": 3, "audio": 2},), stages=({"backbone": 3},), **options):
    """Both encoders in one unit beside the backbone. encoders, backbone: numbers of replicas."""
    recompute, zero = options.pop("recompute", ((), ())), options.pop("zero", (0, 0))
    first = Unit("encoders", encoder_stages, dp=encoders, pp=len(encoder_stages), recompute=recompute[0], zero=zero[0])
    options_of_llm = {"dp": backbone, "pp": len(stages), "recompute": recompute[1], "zero": zero[1]}
    return PlannedCase((first, Unit("llm", stages, first.num_ranks, **options_of_llm)), **options)


APART = (
    Unit("image", ({"image": 3},), dp=2, zero=0),
    Unit("llm", ({"audio": 2, "backbone": 1}, {"backbone": 2}), first_rank=2, pp=2, zero=0),
)
CHAIN = (Unit("all", ({"image": 3, "audio": 1}, {"audio": 1, "backbone": 3}), dp=2, pp=2, zero=0),)
AUDIO = Unit("audio", ({"audio": 2},), dp=2, zero=0)
COPIES = Unit("llm", ({"backbone": 1}, {"backbone": 2}), pp=2, replicated=("image", "audio"), zero=0)
CASES = {
    2: [
        PlannedCase((COPIES,)),
        PlannedCase((replace(COPIES, recompute=({}, {"backbone": 2})),), "gpipe", frozen=("audio",), tied=True),
        PlannedCase((COPIES,), frozen=("backbone",), contents=("image",)),
        PlannedCase((COPIES,), frozen=("image encoder",), contents=(), blocking=True),
        *[PlannedCase((replace(COPIES, zero=zero),), frozen=("audio",), tied=zero == 2) for zero in (1, 2)],
        PlannedCase((replace(COPIES, zero=3),), "gpipe", frozen=("image encoder",)),
    ],
    3: [
        pair(2, 1),
        pair(2, 1, schedule="gpipe", frozen=("image",), contents=("image",)),
        pair(1, 2, tied=True, batch_size=8, microbatch_size=2),
        pair(1, 2, blocking=True, frozen=("backbone",)),
        pair(2, 1, caps={"backbone": 80, "image": 30}, microbatch_size=2),
        pair(1, 2, caps={"backbone": 80, "image": 30}),
        pair(2, 1, balance="per_phase", microbatch_size=2),
        pair(1, 2, balance="joint", schedule="gpipe"),
    ],
    4: [
        PlannedCase(APART),
        PlannedCase(APART, "gpipe", microbatch_size=2, tied=True, blocking=True),
        pair(1, 2, encoder_stages=({"image": 2}, {"image": 1, "audio": 2})),
        pair(3, 1, contents=("image",), recompute=(({"image": 2, "audio": 1},), ({"backbone": 2},))),
        pair(1, 3, contents=()),
        pair(2, 2, balance="auto", frozen=("audio",), tied=True),
        PlannedCase(CHAIN, batch_size=12, microbatch_size=2, balance="per_phase"),
        PlannedCase((replace(COPIES, dp=2),), batch_size=8, balance="joint"),
        PlannedCase((replace(COPIES, first_rank=2, replicated=("image",)), AUDIO)),
    ],
    5: [
        pair(2, 3),  # MMScale's Figure 9.
        pair(2, 3, zero=(3, 1), contents=("image",)),
        pair(3, 2, frozen=("image encoder",), tied=True, zero=(1, 3)),
        pair(1, 4, batch_size=8, microbatch_size=2, zero=(1, 2)),
        pair(2, 3, schedule="gpipe", blocking=True, caps={"backbone": 80, "audio": 40}),
        pair(3, 2, balance="per_phase", batch_size=8, microbatch_size=2),
        pair(2, 3, balance="auto", blocking=True, batch_size=12, caps={"backbone": 80, "image": 30}),
    ],
}
NUM_RANDOM = 2
"""Random cases a number of ranks. `random_pair` makes one of them again from its seed."""


def random_pair(seed, num_ranks):
    """Two units of any sizes, with any of their blocks recomputed, anything frozen, on any mixture of media."""
    rng = np.random.default_rng((seed, num_ranks, 1))
    ranks = int(rng.integers(1, num_ranks))
    replicated = ()
    sides = {"encoders": ({"image": 3, "audio": 2}, ranks), "llm": ({"backbone": 3}, num_ranks - ranks)}
    units, first_rank = [], 0
    if rng.random() < 0.3:  # The backbone's unit begins with the second encoder.
        sides = {"encoders": ({"image": 3}, ranks), "llm": ({"audio": 2, "backbone": 3}, num_ranks - ranks)}
    elif rng.random() < 0.3:  # Each of its stages computes the second encoder.
        sides, replicated = {"encoders": ({"image": 3}, ranks), "llm": ({"backbone": 3}, num_ranks - ranks)}, ("audio",)
    for name, (counts, size) in sides.items():
        pp = int(rng.choice([depth for depth in (1, 2, 3) if size % depth == 0]))
        blocks = [module for module, count in counts.items() for _ in range(count)]
        cuts = [0, *sorted(rng.choice(np.arange(1, len(blocks)), pp - 1, replace=False).tolist()), len(blocks)]
        stages = tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))
        recompute = tuple({key: int(rng.integers(0, count + 1)) for key, count in one.items()} for one in stages)
        recompute = recompute if rng.random() < 0.4 else ()
        copies = replicated if name == "llm" else ()
        sizes = {"dp": size // pp, "pp": pp, "zero": int(rng.integers(0, 2 if copies else 4))}
        units.append(Unit(name, stages, first_rank, recompute=recompute, replicated=copies, **sizes))
        first_rank += size
    microbatch_size = int(rng.integers(1, 3))
    frozen = rng.choice(["image encoder", "image", "audio", "backbone"], rng.integers(0, 3), replace=False)
    return PlannedCase(
        tuple(units),
        str(rng.choice(["gpipe", "1f1b"])),
        batch_size=units[1].dp * microbatch_size * int(rng.integers(1, 4)),
        microbatch_size=microbatch_size,
        frozen=tuple(map(str, frozen)),
        tied=bool(rng.random() < 0.5),
        contents=tuple(name for name in ("image", "audio") if rng.random() < 0.8),
        blocking=bool(rng.random() < 0.5),
        caps={"backbone": 90, "image": 40} if rng.random() < 0.2 else {},
        balance=str(rng.choice(["off", "joint", "per_phase", "auto"])),
        seed=seed,
    )


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: (5,), 3: (6,), 4: (1, 3), 5: (0,)}))
def test_units_of_other_sizes_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 5))])
def test_random_pairs_equal_one_process(num_ranks):
    assert_planned(num_ranks, [random_pair(seed, num_ranks) for seed in range(NUM_RANDOM)])
