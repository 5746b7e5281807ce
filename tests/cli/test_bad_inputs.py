"""A part of benchmarks/bad_inputs.py, drawn evenly from its groups: each input ends as its verdict says."""

import random
from collections import defaultdict

import pytest

from benchmark import benchmark
from ranks import TIMEOUT_S

NUMBERS = [(4, 1), pytest.param(14, 3, marks=pytest.mark.slow)]
"""Of those that are refused and those that are accepted."""


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


@pytest.mark.parametrize(("num_refused", "num_accepted"), NUMBERS)
def test_a_part_of_the_bad_inputs_ends_as_their_verdicts_say(num_refused, num_accepted):
    with benchmark("bad_inputs") as bad_inputs:
        cases = bad_inputs.all_cases(0)
        chosen = [
            *drawn([case for case in cases if case.verdict == "refuse"], num_refused),
            *drawn([case for case in cases if case.verdict == "accept"], num_accepted),
        ]
        outcomes = list(bad_inputs.run_cases(chosen, limit_s=TIMEOUT_S))
        wrong = "\n".join(bad_inputs.described(outcome) for outcome in outcomes if outcome.wrong)
    assert len(outcomes) == num_refused + num_accepted
    assert not wrong, wrong
