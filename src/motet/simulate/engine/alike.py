"""Simulates ranks that are alike on one rank's actions: for each action, an array over ranks.

In data parallelism all ranks do the same (`AlikeRows`) and meet in every collective. So what waits for what is the same
on each rank, and is found once. Then each action of the row is timed on all ranks at a time, in an order in which what
it waits for comes before it. O(actions of a row), each an operation on [num_ranks]; what ends on all ranks at once is
one number. Starts and ends are those of the engine for the whole Program, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain

import numpy as np

from motet.core.arrays import Float64Array, Int32Array, Int64Array
from motet.core.timeline import Timeline
from motet.schedule.dependencies import COLLECTIVES
from motet.schedule.program import AlikeItems, AlikeRows, Program
from motet.simulate.engine.action_seconds import ActionShares
from motet.simulate.engine.lower import Waits
from motet.simulate.engine.stage_times import AlikeParts, StageTimes
from motet.simulate.engine.table import CODES, ActionTable
from motet.simulate.engine.turns import NO_TURN, turns

_COLUMNS = tuple(
    field.name for field in fields(Timeline) if field.name not in ("num_ranks", "rank_names", "rank_counts")
)
_COLLECTIVE_CODES = np.array([CODES[kind] for kind in COLLECTIVES])


def one_rank(program: Program) -> Program | None:
    """The Program of rank 0 alone if all ranks are alike and meet in every collective; else None. O(stages of a rank),
    or O(stages) where stages and edges are listed.
    """
    rows = program.actions
    if not isinstance(rows, AlikeRows) or len(rows) < 2 or len(program.edges) % len(rows):
        return None
    num_stages, num_edges = rows.num_stages, len(program.edges) // len(rows)
    if isinstance(program.stages, AlikeItems) and isinstance(program.edges, AlikeItems):
        of_first = {stage.group for stage in program.stages.first}
        if min(of_first) < 0 or len(of_first) < num_stages:
            return None
        return Program(program.stages.first, program.edges.first, (rows.first,), program.num_microbatches)
    groups = np.array([stage.group for stage in program.stages]).reshape(len(rows), num_stages)
    edges = np.array(program.edges, dtype=np.int64).reshape(len(rows), num_edges, 2)
    shifted = edges[:1] + (np.arange(len(rows)) * num_stages)[:, None, None]
    first = groups[0]
    if (first < 0).any() or len(set(first.tolist())) < num_stages:
        return None
    if (groups != first).any() or not np.array_equal(edges, shifted):
        return None
    return Program(program.stages[:num_stages], program.edges[:num_edges], (rows.first,), program.num_microbatches)


def have_like_parts(times: StageTimes, num_stages: int) -> bool:
    """Whether the parts of each stage are those of the same stage of rank 0. num_stages: of a rank."""
    return all(
        parts.get(stage % num_stages) == slices
        for parts in (times.forward_parts, times.backward_parts)
        if not (isinstance(parts, AlikeParts) and parts.num_stages == num_stages)
        for stage, slices in parts.items()
    )


def of_first_rank(times: StageTimes, num_stages: int) -> StageTimes:
    """The times with the parts of rank 0 alone."""
    forward, backward = (
        parts.first
        if isinstance(parts, AlikeParts)
        else {stage: slices for stage, slices in parts.items() if stage < num_stages}
        for parts in (times.forward_parts, times.backward_parts)
    )
    return replace(times, forward_parts=forward, backward_parts=backward)


def run_alike(
    table: ActionTable,
    held: Int32Array,
    shares: ActionShares,
    needs: Waits,
    meetings: Float64Array | None = None,
    kept: tuple[Float64Array, Float64Array] | None = None,
) -> tuple[Float64Array, float] | None:
    """When each collective begins, and what it takes on the slowest rank, [num_actions, 2]; and the last end. None
    where actions wait for each other.

    table:    of one rank. held: the stream that each action occupies. needs: what each action waits for.
    meetings: what was returned for all ranks, where the shares are of some.
    kept:     start and end of each action on each rank, [num_actions, num_ranks] each, if they are to be filled in.
    """
    before = _before(held, needs)
    dependent, dependency = _pairs(before)
    turn = turns(len(before), dependent, dependency)
    if (turn == NO_TURN).any():
        return None
    is_collective = np.isin(table.kind, _COLLECTIVE_CODES).tolist()
    num_waiting = np.bincount(dependency, minlength=len(before)).tolist()
    found = np.zeros((len(before), 2)) if meetings is None else meetings
    ends: dict[int, Float64Array] = {}  # Of what is still waited for.
    last_s = 0.0
    for action in np.argsort(turn, kind="stable").tolist():
        ready = np.zeros(1)
        for needed in before[action]:
            ready = np.maximum(ready, ends[needed])
            num_waiting[needed] -= 1
            if not num_waiting[needed]:
                del ends[needed]
        if is_collective[action]:
            if meetings is None:
                found[action] = ready.max(), shares.most_s(action)
            ready = found[action, :1]
            end = ready + found[action, 1]
        else:
            end = ready + shares.total_s(action)
        if kept is not None:
            kept[0][action], kept[1][action] = ready, end
        if num_waiting[action]:
            ends[action] = end
        else:
            last_s = max(last_s, float(end.max()))
    return found, last_s


def _before(held: Int32Array, needs: Waits) -> list[list[int]]:
    """What each action waits for: the one before it in its stream, and of its dependencies the last of each stream."""
    before: list[dict[int, int]] = [{} for _ in range(len(held))]
    last: dict[int, int] = {}
    streams = held.tolist()
    for action, stream in enumerate(streams):
        if stream in last:
            before[action][stream] = last[stream]
        last[stream] = action
    for dependent, dependency in zip(needs.dependent.tolist(), needs.dependency.tolist()):
        waited = before[dependent]
        waited[streams[dependency]] = max(waited.get(streams[dependency], dependency), dependency)
    return [list(waited.values()) for waited in before]


def _pairs(before: list[list[int]]) -> tuple[Int64Array, Int64Array]:
    """The pairs of an action and one that it waits for, [num_pairs] each."""
    dependent = np.repeat(np.arange(len(before)), np.array(list(map(len, before)), dtype=np.int64))
    return dependent, np.array(list(chain.from_iterable(before)), dtype=np.int64)


class AlikeTimeline(Timeline):
    """The Timeline of ranks that are alike: its columns are made when one of them is read.

    The columns of a step of thousands of ranks have millions of entries. A search reads few of them, and a picture
    shows some ranks (`some`).

    num_spans: how many spans it has. makespan_s: as of a Timeline. expand: makes the Timeline of some ranks.
    computing: gives what each rank computes, and two sums of the seconds of its actions by which ranks are told apart,
               [3, num_ranks].
    """

    _num_spans: int
    _makespan_s: float
    _expand: Callable[[Int64Array], Timeline]
    _computing: Callable[[], Float64Array]

    def __init__(
        self,
        num_ranks: int,
        num_spans: int,
        makespan_s: float,
        expand: Callable[[Int64Array], Timeline],
        computing: Callable[[], Float64Array],
        rank_names: Sequence[str] = (),
    ) -> None:
        # The fields of a Timeline cannot be assigned.
        self.__dict__.update(num_ranks=num_ranks, rank_names=rank_names)
        self.__dict__.update(_num_spans=num_spans, _makespan_s=makespan_s, _expand=expand, _computing=computing)

    def named(self, rank_names: Sequence[str], rank_counts: Sequence[int] = ()) -> AlikeTimeline:
        # Each stands for as many of a cluster, so that means over them need no counts.
        return AlikeTimeline(
            self.num_ranks, self._num_spans, self._makespan_s, self._expand, self._computing, rank_names
        )

    def __len__(self) -> int:
        return self._num_spans

    @property
    def makespan_s(self) -> float:
        return self._makespan_s

    @cached_property
    def _told(self) -> Float64Array:
        """The result of `computing`."""
        return self._computing()

    @property
    def busy_s(self) -> Float64Array:
        """Seconds that each rank computes, [num_ranks]: `Bubbles.busy_s`, without the spans."""
        busy_s: Float64Array = self._told[0]
        return busy_s

    @cached_property
    def leader(self) -> Int64Array:
        """For each rank the first that takes the same time for all that it does, int64 [num_ranks]."""
        told = np.round(self._told.T / (self._told.max() or 1.0), 9)
        _, first, group = np.unique(told, axis=0, return_index=True, return_inverse=True)
        return first[group.reshape(-1)].astype(np.int64)

    def some(self, ranks: Int64Array) -> Timeline:
        """The Timeline of some ranks alone, ascending, numbered from 0; they keep their names."""
        shown = self._expand(ranks)
        names = [self.rank_name(rank) for rank in ranks.tolist()]
        numbers = np.searchsorted(ranks, shown.rank).astype(np.int32)
        return replace(shown, rank=numbers, num_ranks=len(ranks), rank_names=names)

    def __getattr__(self, name: str) -> object:
        """A column, which is not there before it is read."""
        if name not in _COLUMNS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        whole = self._expand(np.arange(self.num_ranks))
        self.__dict__.update({column: getattr(whole, column) for column in _COLUMNS})
        return self.__dict__[name]
