"""How many bytes of activations each rank of a Program holds at most, from what a stage holds for a microbatch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array, IndexArray
from motet.core.errors import ArgumentError
from motet.schedule.program import AlikeRows, Kind, Program


def high_water(program: Program, held_bytes: ArrayLike) -> Float64Array:
    """The most bytes that each rank holds at a time, float64 [num_ranks].

    held_bytes: [num_stages] or [num_stages, num_microbatches], what a forward pass leaves for backward: of a stage that
                is recomputed, its input alone. It is held from the start of F to the end of B, or of W where backward
                is split; a stage without backward holds nothing. Or [n, num_stages, num_microbatches], of n jobs with
                that Program; the answer is [n, num_ranks].
    Raises ArgumentError for another shape, or bytes below 0. O(n * actions).
    """
    held = _checked(program, held_bytes)
    if isinstance(program.actions, AlikeRows):
        by_rank = held.reshape(*held.shape[:-2], program.num_ranks, program.actions.num_stages, -1)
        return _most(by_rank, _events(program, 0))
    most = np.zeros((*held.shape[:-2], program.num_ranks))
    for rank in range(program.num_ranks):
        most[..., rank] = _most(held, _events(program, rank))
    return most


_Events = tuple[IndexArray, IndexArray, Float64Array]


def _most(held: Float64Array, events: _Events) -> Float64Array:
    """Of the levels that events lead to, [...]. held: [..., num_stages, num_microbatches]."""
    stage, microbatch, sign = events
    levels = np.cumsum(held[..., stage, microbatch] * sign, axis=-1)
    most: Float64Array = levels.max(axis=-1, initial=0.0)
    return most


def _events(program: Program, rank: int) -> _Events:
    """Stage, microbatch, and 1 where a rank begins, or -1 where it ceases, to hold what F left; in order."""
    row, ends = program.actions[rank], _ends(program, rank)
    found: list[tuple[int, int, int]] = []
    for index, (stage, kind, microbatch, part, _) in enumerate(row):
        if kind is Kind.F and part <= 0 and (stage, microbatch) in ends:
            found.append((stage, microbatch, 1))
        if ends.get((stage, microbatch)) == index:
            found.append((stage, microbatch, -1))
    columns = np.array(found, dtype=np.intp).reshape(-1, 3).T
    return columns[0], columns[1], columns[2].astype(np.float64)


def held_table(program: Program, held_bytes: ArrayLike) -> list[list[float]]:
    """held_bytes as [num_stages][num_microbatches]."""
    rows: list[list[float]] = _checked(program, held_bytes).tolist()
    return rows


def _checked(program: Program, held_bytes: ArrayLike) -> Float64Array:
    """[..., num_stages, num_microbatches]"""
    table = np.asarray(held_bytes, dtype=np.float64)
    shape = (program.num_stages, program.num_microbatches)
    if table.shape != shape[:1] and (table.ndim > 3 or table.shape[-2:] != shape):
        raise ArgumentError(f"held_bytes has shape {table.shape}; it must be {shape[:1]} or {shape}.")
    if not (table >= 0).all():
        raise ArgumentError("held_bytes has a number that is below 0, or none.")
    return np.broadcast_to(table[:, None], shape) if table.ndim == 1 else table


def levels(program: Program, rank: int, held: list[list[float]]) -> Iterator[float]:
    """Bytes held during each action of a rank."""
    ends = _ends(program, rank)
    level = 0.0
    for index, (stage, kind, microbatch, part, _) in enumerate(program.actions[rank]):
        if kind is Kind.F and part <= 0 and (stage, microbatch) in ends:
            level += held[stage][microbatch]
        yield level
        if ends.get((stage, microbatch)) == index:
            level -= held[stage][microbatch]


def _ends(program: Program, rank: int) -> dict[tuple[int, int], int]:
    """Per stage and microbatch, the place of the action after which the rank holds nothing of it."""
    return {
        (stage, microbatch): index
        for index, (stage, kind, microbatch, _, _) in enumerate(program.actions[rank])
        if kind in (Kind.B, Kind.W)
    }
