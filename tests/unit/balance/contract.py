"""What every placement must be, whatever the algorithm and the backend."""

import numpy as np

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
