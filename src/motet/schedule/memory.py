"""How many bytes of activations each rank of a Program holds at most, from what a stage holds for a microbatch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.core.errors import ArgumentError
from motet.schedule.program import Kind, Program


def high_water(program: Program, held_bytes: ArrayLike) -> NDArray[np.float64]:
    """The most bytes that each rank holds at a time, float64 [num_ranks].

    held_bytes: [num_stages] or [num_stages, num_microbatches], what a forward pass leaves for backward: of a stage that
                is recomputed, its input alone. It is held from the start of F to the end of B, or of W where backward
                is split; a stage without backward holds nothing.
    Raises ArgumentError for another shape, or bytes below 0. O(actions).
    """
    held = held_table(program, held_bytes)
    return np.array([max(levels(program, rank, held), default=0.0) for rank in range(program.num_ranks)])


def held_table(program: Program, held_bytes: ArrayLike) -> list[list[float]]:
    """held_bytes as [num_stages][num_microbatches]."""
    table = np.asarray(held_bytes, dtype=np.float64)
    shape = (program.num_stages, program.num_microbatches)
    if table.shape not in (shape[:1], shape):
        raise ArgumentError(f"held_bytes has shape {table.shape}; it must be {shape[:1]} or {shape}.")
    if not (table >= 0).all():
        raise ArgumentError("held_bytes has a number that is below 0, or none.")
    rows: list[list[float]] = np.broadcast_to(table.reshape(shape[0], -1), shape).tolist()
    return rows


def levels(program: Program, rank: int, held: list[list[float]]) -> Iterator[float]:
    """Bytes held during each action of a rank."""
    row = program.actions[rank]
    ends = {}
    for index, (stage, kind, microbatch, _, _) in enumerate(row):
        if kind in (Kind.B, Kind.W):
            ends[stage, microbatch] = index
    level = 0.0
    for index, (stage, kind, microbatch, part, _) in enumerate(row):
        if kind is Kind.F and part <= 0 and (stage, microbatch) in ends:
            level += held[stage][microbatch]
        yield level
        if ends.get((stage, microbatch)) == index:
            level -= held[stage][microbatch]
