"""All phases at once: one example -> rank assignment that balances every phase, so that no encoder output moves."""

from __future__ import annotations

from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_num_ranks
from motet.balance.home import assign_jointly_from_home, check_unused
from motet.core.assignment import Assignment


def assign_jointly(
    costs: ArrayLike,
    num_ranks: int,
    *,
    home: ArrayLike | None = None,
    bytes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    backend: Backend = "native",
) -> Assignment:
    """Place whole examples so that the sum over phases of the largest load is small.

    costs: int [num_examples, num_phases], >= 0, in one unit for all phases (FLOPs, nanoseconds); 0 where an example has
    nothing for a phase. The Assignment has loads [num_ranks, num_phases] and bound [num_phases].

    home: int [num_examples], the rank that holds each example; with it, few of the `bytes`, int [num_examples], that
    move with an example (None: each counts alike) leave their node of `ranks_per_node` ranks (None: each rank is a
    node).
    """
    checked = checked_integers(costs, "costs", 2)
    num_ranks = checked_num_ranks(num_ranks)
    if home is not None:

        def anywhere() -> Assignment:
            return assign_jointly(checked, num_ranks, backend=backend)

        return assign_jointly_from_home(checked, num_ranks, home, bytes, ranks_per_node, anywhere, backend)
    check_unused(bytes=bytes, ranks_per_node=ranks_per_node)
    return Assignment(*algorithms("reference").joint(checked, num_ranks))
