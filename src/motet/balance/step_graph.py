"""A pipeline's step as a graph: the operations of its Program, in whatever schedule, and what each waits for.

The graph does not depend on lengths. Durations do, and so does the order of microbatches: position p of the order is
the p-th microbatch of the Program, and any microbatch's content may stand there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from motet.core.arrays import Int32Array, Int64Array


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The operations of a step, each behind all that it waits for.

    row:      int32 [num_operations], the row of durations that an operation takes its own from.
    position: int32 [num_operations], the position of the microbatch that it computes or moves; num_microbatches if it
              serves the whole step.
    offsets:  int32 [num_operations + 1]; operation i waits for needs[offsets[i]:offsets[i + 1]], which are below i.
    needs:    int32 [num_needs].
    gaps:     int32 [num_microbatches, 4], for each position: (entry, before, backward, count). entry is the first
              forward pass on the pipeline's first rank, before the operation before it there (-1: none), backward the
              next backward pass there (-1: none), and count the forward passes from entry to backward.
    num_last: the number of positions at the end whose backward passes have no forward passes between them there.

    Example:
        Two stages, two microbatches: F0 of both stages, then F1 and B0 of the last, ...
        >>> graph = one_f_one_b_graph(num_stages=2, num_microbatches=2)
        >>> graph.row.tolist(), graph.position.tolist()
        ([0, 1, 3, 0, 1, 2, 3, 2], [0, 0, 0, 1, 1, 0, 1, 1])
    """

    row: Int32Array
    position: Int32Array
    offsets: Int32Array
    needs: Int32Array
    gaps: Int32Array
    num_last: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows of durations."""
        return int(self.row.max(initial=-1)) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step."""
        return len(self.gaps)


def graph_of_needs(
    row: Int64Array,
    position: Int64Array,
    dependent: Int64Array,
    dependency: Int64Array,
    gaps: Int32Array,
    num_last: int,
) -> StepGraph:
    """The StepGraph in which operation dependent[i] waits for dependency[i]; one may come twice. Others as there."""
    # A pair as one number: pairs themselves are sorted ten times as slowly. They come in runs, which a stable sort
    # merges in a hundredth of the time in which `np.unique` hashes them.
    pairs = np.sort(dependent * len(row) + dependency, kind="stable")
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    offsets = np.searchsorted(pairs, np.arange(len(row) + 1) * len(row))
    needs = pairs % max(len(row), 1)
    narrow = [np.ascontiguousarray(column, dtype=np.int32) for column in (row, position, offsets, needs)]
    return StepGraph(narrow[0], narrow[1], narrow[2], narrow[3], gaps, num_last)


@lru_cache(maxsize=8)
def one_f_one_b_graph(num_stages: int, num_microbatches: int) -> StepGraph:
    """The StepGraph of 1F1B without messages: rows are the forwards of all stages, then their backwards.

    Stage s does num_stages - 1 - s forwards, then forwards and backwards in turn, then the remaining backwards.
    """
    stage, microbatch = (axis.ravel() for axis in np.indices((num_stages, num_microbatches)))
    behind = num_stages - 1 - stage
    # 1. In round r all stages do forward r, and then each the backward that it makes room for.
    rounds = np.concatenate([microbatch, microbatch + behind])
    is_backward = np.repeat([0, 1], len(stage))
    stages, microbatches = np.tile(stage, 2), np.tile(microbatch, 2)
    order = np.lexsort((stages, is_backward, rounds))
    index = np.empty_like(order)
    index[order] = np.arange(len(order))
    forward, backward = index.reshape(2, num_stages, num_microbatches)
    # 2. An operation waits for the one before it on its stage, and for its neighbour's pass of its microbatch.
    on_stage = np.sort(np.concatenate([forward, backward], axis=1), axis=1)
    pairs = [(on_stage[:, 1:], on_stage[:, :-1]), (forward[1:], forward[:-1]), (backward[:-1], backward[1:])]
    dependent, dependency = (np.concatenate([pair[end].ravel() for pair in pairs]) for end in (0, 1))
    row = (stages + num_stages * is_backward)[order]
    gaps = gaps_of(forward[0], forward[0], backward[0], on_stage[0])
    num_last = min(num_stages, num_microbatches) - 1 if num_microbatches else 0
    return graph_of_needs(row, microbatches[order], dependent, dependency, gaps, num_last)


def gaps_of(entries: Int64Array, forwards: Int64Array, backwards: Int64Array, passes: Int64Array) -> Int32Array:
    """The column `gaps` of a StepGraph.

    entries:             the entry of each position, [num_microbatches].
    forwards, backwards: passes on the rank of the entries that fill gaps, and that end them, ascending.
    passes:              all that this rank computes, ascending.
    """
    before = np.append(passes, -1)[np.searchsorted(passes, entries) - 1]
    backward = np.append(backwards, -1)[np.searchsorted(backwards, entries)]
    stop = np.where(backward < 0, entries + 1, backward)
    count = np.searchsorted(forwards, stop) - np.searchsorted(forwards, entries)
    gaps: Int32Array = np.stack([entries, before, backward, count], axis=1).astype(np.int32)
    return gaps
