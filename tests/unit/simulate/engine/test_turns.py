import numpy as np
import pytest

from motet.simulate.engine.turns import NO_TURN, turns


@pytest.mark.parametrize("seed", range(5))
def test_each_operation_comes_one_turn_behind_the_last_that_it_waits_for(seed):
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.permuted(np.tile(np.arange(30), (60, 1)), axis=1)[:, :2], axis=1)
    dependency, dependent = rng.permutation(30)[ends].T
    found = turns(30, dependent, dependency)
    for operation in range(30):
        needed = found[dependency[dependent == operation]]
        assert found[operation] == (needed.max() + 1 if len(needed) else 0)


def test_a_circle_and_what_waits_for_it_have_no_turn():
    assert turns(4, np.array([0, 1, 2]), np.array([1, 0, 1])).tolist() == [NO_TURN, NO_TURN, NO_TURN, 0]
