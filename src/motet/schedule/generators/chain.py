"""A chain of stages, each of which feeds the next. The generators of this folder share these functions."""

from __future__ import annotations

from collections.abc import Sequence

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Program, Stage


def chain_program(stage_ranks: Sequence[int], rows: Sequence[Sequence[Action]], num_microbatches: int) -> Program:
    """A Program whose stage s is on rank stage_ranks[s] and takes in the output of stage s - 1.

    rows: the actions of each rank, in order.
    """
    return Program(
        stages=tuple(Stage(rank) for rank in stage_ranks),
        edges=tuple((stage, stage + 1) for stage in range(len(stage_ranks) - 1)),
        actions=tuple(tuple(row) for row in rows),
        num_microbatches=num_microbatches,
    )


def check_counts(schedule: str, **counts: int) -> None:
    """Raises ArgumentError for a count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ArgumentError(f"{schedule}: {name} is {count}; it must be at least 1.")


def backward_flags(schedule: str, has_backward: Sequence[bool] | None, num_stages: int) -> list[bool]:
    """has_backward, or all True.

    Only leading stages may have no backward pass, because gradients come from the chain's end. Raises ArgumentError for
    other flags, and for another number of flags than stages.
    """
    flags = [True] * num_stages if has_backward is None else list(has_backward)
    if len(flags) != num_stages:
        raise ArgumentError(f"{schedule}: has_backward has {len(flags)} flags; it must have one a stage, {num_stages}.")
    if flags != sorted(flags):
        stage = next(stage for stage in range(1, num_stages) if flags[stage - 1] and not flags[stage])
        raise ArgumentError(
            f"{schedule}: stage {stage} has no backward pass, but stage {stage - 1} needs a gradient from it; only "
            "leading stages may have no backward pass."
        )
    return flags
