"""What every placement must be, whatever the algorithm and the backend."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

BACKENDS = ["native", "reference"]


def check_structure(assignment, num_items, num_ranks):
    """Each item once, in item order on its rank, with the types that the native core gives."""
    assert assignment.ranks.dtype == np.int32
    assert {assignment.items.dtype, assignment.offsets.dtype, assignment.loads.dtype} == {np.dtype(np.int64)}
    assert assignment.num_items == num_items
    assert assignment.num_ranks == num_ranks
    assert sorted(assignment.items.tolist()) == list(range(num_items))
    for rank in range(num_ranks):
        items = assignment.on_rank(rank).tolist()
        assert items == sorted(items)
        assert (assignment.ranks[items] == rank).all()
    assert (assignment.bound <= assignment.loads.max(axis=0)).all()


def check_equal(a, b):
    """Two backends, or two calls, decided the same."""
    for field in ("ranks", "items", "offsets", "loads", "bound"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


@st.composite
def nodes_of(draw, num_ranks):
    """`RanksPerNode`: one number, or those of nodes of any sizes."""
    if num_ranks == 0 or draw(st.booleans()):
        return draw(st.integers(1, num_ranks + 3))
    cuts = draw(st.sets(st.integers(1, num_ranks - 1))) if num_ranks > 1 else set()
    ends = [0, *sorted(cuts), num_ranks]
    return tuple(end - begin for begin, end in pairwise(ends))
