"""The problem of the joint assignment, and its state: the examples of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array

NEAR_BITS = 11
"""A placement within 2^-11 of the sum of the bounds is good enough."""


@dataclass(frozen=True)
class JointProblem:
    """costs: int64 [num_examples, num_phases]. bound: int64 [num_phases], a lower bound of each largest load."""

    costs: Int64Array
    num_ranks: int
    bound: Int64Array

    @property
    def goal(self) -> int:
        """The objective that is good enough: 2^-11 above the sum of the bounds."""
        bound = int(self.bound.sum())
        return bound + (bound >> NEAR_BITS)


class JointState:
    """The examples of each rank, and loads, int64 [num_ranks, num_phases]."""

    def __init__(self, problem: JointProblem) -> None:
        self.costs = problem.costs
        self.examples: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        self.loads = np.zeros((problem.num_ranks, problem.costs.shape[1]), dtype=np.int64)

    @property
    def objective(self) -> int:
        """The sum over phases of the largest load."""
        return int(self.loads.max(axis=0).sum())

    def add(self, rank: int, example: int) -> None:
        """Put an example on a rank."""
        self.examples[rank].append(example)
        self.loads[rank] += self.costs[example]
