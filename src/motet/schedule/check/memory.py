"""The most bytes of activations that each rank of a Program holds at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array, IndexArray
from motet.core.errors import ArgumentError
from motet.schedule.program import AlikeRows, Kind, Program

_MANY_ISLANDS = 256
"""From so many on, their levels are computed event by event."""


def high_water(program: Program, held_bytes: ArrayLike) -> Float64Array:
    """The most bytes that each rank holds at a time, float64 [num_ranks], or [n, num_ranks].

    held_bytes: [num_stages] or [num_stages, num_microbatches]: bytes that a forward pass keeps for backward (only its
                input, if the stage is recomputed). They are held from the start of F to the end of B, or of W if
                backward is split. A stage without backward holds 0. A third axis in front, [n, ...], is for n islands
                that run the Program.
    Raises ArgumentError for another shape, and for bytes below 0 or NaN. O(n * actions).
    """
    held = _checked(program, held_bytes)
    if isinstance(program.actions, AlikeRows):
        by_rank = held.reshape(*held.shape[:-2], program.num_ranks, program.actions.num_stages, -1)
        return _most_of_alike(by_rank, _events(program, 0))
    if held.ndim > 2 and len(held) >= _MANY_ISLANDS:
        by_pass = np.ascontiguousarray(np.moveaxis(held, 0, -1)).transpose(2, 0, 1)
        columns = (_most_of_alike(by_pass, _events(program, rank)) for rank in range(program.num_ranks))
        return np.stack(list(columns), axis=1)
    most = np.zeros((*held.shape[:-2], program.num_ranks))
    for rank in range(program.num_ranks):
        most[..., rank] = _most(held, _events(program, rank))
    return most


_Events = tuple[IndexArray, IndexArray, Float64Array]
"""(stage, microbatch, sign) of each event of a rank, in order. Sign 1: activations are made; -1: they are freed."""


def _most(held: Float64Array, events: _Events) -> Float64Array:
    """The highest level that the events reach, [...]. held: [..., num_stages, num_microbatches]."""
    stage, microbatch, sign = events
    levels = np.cumsum(held[..., stage, microbatch] * sign, axis=-1)
    most: Float64Array = levels.max(axis=-1, initial=0.0)
    return most


def _most_of_alike(held: Float64Array, events: _Events) -> Float64Array:
    """`_most` of many ranks or islands, event by event: a table of all their levels has millions of entries."""
    most: Float64Array = np.zeros(held.shape[:-2])
    level = np.zeros_like(most)
    for stage, microbatch, sign in zip(*(column.tolist() for column in events)):
        level += held[..., stage, microbatch] * sign
        np.maximum(most, level, out=most)
    return most


def _events(program: Program, rank: int) -> _Events:
    row, freed_at = program.actions[rank], _freed_at(program, rank)
    events: list[tuple[int, int, int]] = []
    for index, (stage, kind, microbatch, part, _) in enumerate(row):
        if kind is Kind.F and part <= 0 and (stage, microbatch) in freed_at:
            events.append((stage, microbatch, 1))
        if freed_at.get((stage, microbatch)) == index:
            events.append((stage, microbatch, -1))
    columns = np.array(events, dtype=np.intp).reshape(-1, 3).T
    return columns[0], columns[1], columns[2].astype(np.float64)


def held_table(program: Program, held_bytes: ArrayLike) -> list[list[float]]:
    """held_bytes as [num_stages][num_microbatches]. Raises as `high_water` does."""
    rows: list[list[float]] = _checked(program, held_bytes).tolist()
    return rows


def _checked(program: Program, held_bytes: ArrayLike) -> Float64Array:
    """[..., num_stages, num_microbatches]"""
    table = np.asarray(held_bytes, dtype=np.float64)
    shape = (program.num_stages, program.num_microbatches)
    if table.shape != shape[:1] and (table.ndim > 3 or table.shape[-2:] != shape):
        raise ArgumentError(f"held_bytes has shape {table.shape}; it must be {shape[:1]} or {shape}.")
    if not (table >= 0).all():
        raise ArgumentError("held_bytes has a number that is below 0, or NaN.")
    return np.broadcast_to(table[:, None], shape) if table.ndim == 1 else table


def levels(program: Program, rank: int, held: list[list[float]]) -> Iterator[float]:
    """Bytes held during each action of a rank. held: of `held_table`."""
    freed_at = _freed_at(program, rank)
    level = 0.0
    for index, (stage, kind, microbatch, part, _) in enumerate(program.actions[rank]):
        if kind is Kind.F and part <= 0 and (stage, microbatch) in freed_at:
            level += held[stage][microbatch]
        yield level
        if freed_at.get((stage, microbatch)) == index:
            level -= held[stage][microbatch]


def _freed_at(program: Program, rank: int) -> dict[tuple[int, int], int]:
    """Per stage and microbatch, the index of the action that frees its activations: the last part of B or W."""
    return {
        (stage, microbatch): index
        for index, (stage, kind, microbatch, _, _) in enumerate(program.actions[rank])
        if kind in (Kind.B, Kind.W)
    }
