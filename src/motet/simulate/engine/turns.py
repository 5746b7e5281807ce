"""In which turn each operation of a step could run if each took one turn: an order in which none comes before what it
waits for."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Int64Array

NO_TURN = -1


def turns(num: int, dependent: Int64Array, dependency: Int64Array) -> Int64Array:
    """The turn of each of `num` operations, int64 [num]; NO_TURN for those in a circle, and for what waits for them.

    dependent[i] waits for dependency[i]. O(num + dependencies).

    Example: operation 2 waits for both others, and 1 for 0.
        >>> turns(3, np.array([2, 2, 1]), np.array([0, 1, 0])).tolist()
        [0, 1, 2]
    """
    turn, missing = [0] * num, np.bincount(dependent, minlength=num).tolist()
    order = np.argsort(dependency, kind="stable")
    after, first = dependent[order].tolist(), np.searchsorted(dependency[order], np.arange(num + 1)).tolist()
    ready = [operation for operation, count in enumerate(missing) if count == 0]
    for operation in ready:  # It grows while it is walked.
        for waiting in after[first[operation] : first[operation + 1]]:
            turn[waiting] = max(turn[waiting], turn[operation] + 1)
            missing[waiting] -= 1
            if missing[waiting] == 0:
                ready.append(waiting)
    found = np.full(num, NO_TURN, dtype=np.int64)
    found[ready] = np.array(turn, dtype=np.int64)[ready]
    return found
