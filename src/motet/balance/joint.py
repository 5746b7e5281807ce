"""All phases at once: one example -> rank assignment that balances every phase, so that no encoder output moves."""

from __future__ import annotations

from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_num_ranks
from motet.core.assignment import Assignment


def assign_jointly(costs: ArrayLike, num_ranks: int, *, backend: Backend = "native") -> Assignment:
    """Place whole examples so that the sum over phases of the largest load is small.

    costs: int [num_examples, num_phases], >= 0, in one unit for all phases (FLOPs, nanoseconds); 0 where an example has
    nothing for a phase. The Assignment has loads [num_ranks, num_phases] and bound [num_phases].
    """
    return Assignment(*algorithms("reference").joint(checked_integers(costs, "costs", 2), checked_num_ranks(num_ranks)))
