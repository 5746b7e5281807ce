"""A part of benchmarks/bad_inputs.py, drawn evenly from its groups: each input ends as its verdict says."""

import random
from collections import defaultdict

from benchmark import benchmark
from ranks import TIMEOUT_S

NUM_REFUSED, NUM_ACCEPTED = 14, 3


def drawn(cases, num_cases):
    """As many cases of each group as there are, in turns."""
    groups = defaultdict(list)
    for case in cases:
        groups[case.name.rpartition("/")[0]].append(case)
    rng = random.Random(0)
    for group in groups.values():
        rng.shuffle(group)
    turns = [
        case for turn in range(max(map(len, groups.values()))) for of in groups.values() for case in of[turn : turn + 1]
    ]
    return turns[:num_cases]


def test_a_part_of_the_bad_inputs_ends_as_their_verdicts_say():
    with benchmark("bad_inputs") as bad_inputs:
        cases = bad_inputs.all_cases(0)
        chosen = [
            *drawn([case for case in cases if case.verdict == "refuse"], NUM_REFUSED),
            *drawn([case for case in cases if case.verdict == "accept"], NUM_ACCEPTED),
        ]
        outcomes = list(bad_inputs.run_cases(chosen, limit_s=TIMEOUT_S))
        wrong = "\n".join(bad_inputs.described(outcome) for outcome in outcomes if outcome.wrong)
    assert len(outcomes) == NUM_REFUSED + NUM_ACCEPTED
    assert not wrong, wrong
