"""What the starts and the search of the joint assignment share: the problem, and examples on ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Int64Array

NEAR_BITS = 11
"""Within 2^-11 of the bounds a placement is good enough."""


@dataclass(frozen=True)
class JointProblem:
    """costs int64 [num_examples, num_phases], bound int64 [num_phases]: no phase's largest load can be smaller."""

    costs: Int64Array
    num_ranks: int
    bound: Int64Array

    @property
    def goal(self) -> int:
        """An objective that is good enough."""
        bound = int(self.bound.sum())
        return bound + (bound >> NEAR_BITS)


class JointState:
    """Examples by rank, and loads int64 [num_ranks, num_phases]."""

    def __init__(self, problem: JointProblem) -> None:
        self.costs = problem.costs
        self.examples: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        self.loads = np.zeros((problem.num_ranks, problem.costs.shape[1]), dtype=np.int64)

    @property
    def objective(self) -> int:
        """The sum over phases of the largest load."""
        return int(self.loads.max(axis=0).sum())

    def add(self, rank: int, example: int) -> None:
        self.examples[rank].append(example)
        self.loads[rank] += self.costs[example]
