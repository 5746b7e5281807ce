"""The ways to run each module of a job as a unit of its own: the tables that ranks are allocated from.

A row stands for a number of examples in a microbatch, a TP, a PP and a share of the blocks that is recomputed.

- Time: its slowest stage is that of the best cut. If microbatches differ, a stage of a pipeline of d stages spends on
  each as much as on the longest of d, on average: 1F1B keeps d of them in flight, and those behind a long one wait.
- Bytes: the fullest stage is taken to have the fullest ceil(blocks / PP) neighbours.

What is proposed is cut and counted exactly afterwards (`propose.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.plan import Unit
from motet.core.spec import Layer
from motet.cost.memory import stage_layers, stage_memory
from motet.planner.disaggregated.allocation import UnitOptions
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import BlockCosts, Job
from motet.planner.stages.partition import slowest_stage_s
from motet.simulate.predict.memory import MAX_LOGITS

RECOMPUTED_SHARES = {"none": (0.0,), "least": (0.0, 0.5, 1.0), "full": (1.0,)}
"""Shares of the blocks that are recomputed while ranks are allocated, by recompute mode. The least that fits is found
afterwards."""
_MAX_MICROBATCH_SIZE = 64
"""Examples of the largest microbatch of an encoder or generator."""
_NUM_REPLICAS = 32
"""Gradients are taken to be reduced over at most so many replicas: with more, a link carries about as many bytes."""
_MAX_EXAMPLES = 4096
"""Seconds and bytes are estimated from at most so many examples of a batch."""
_NUM_QUANTILES = 512
"""A distribution of many values is taken as the means of so many groups of neighbours."""


def microbatch_sizes(job: Job, largest: int = _MAX_MICROBATCH_SIZE, *, apart: int = 1) -> tuple[int, ...]:
    """Divisors of the batch up to `largest`, each at least `apart` times the one before."""
    sizes = [1]
    for size in range(2, min(largest, job.batch_size) + 1):
        if job.batch_size % size == 0 and size >= apart * sizes[-1]:
            sizes.append(size)
    return tuple(sizes)


def unit_options(
    job: Job,
    name: str,
    side: Literal[-1, 0, 1],
    sizes: Sequence[int],
    shares: Sequence[float],
    pp: int | None = None,
) -> UnitOptions:
    """The rows of one module: every TP and PP, for these microbatch sizes and shares of blocks recomputed.

    pp: only this PP; None is every one whose slowest stage is faster than those of all shorter pipelines.
    Raises ArgumentError where the costs of the job do. O(sizes * degrees * blocks^3), vectorised.
    """
    if job.batch_size > _MAX_EXAMPLES:
        job = replace(job, batch_size=_MAX_EXAMPLES)
    parts, keys = [], []
    every = np.arange(1, len(job.model.module(name).blocks) + 1)
    for size in sizes:
        longest = longest_of(job.unevenness(name, size), len(every))
        for tp in tensor_degrees(job, name):
            part = _of_costs(job, name, size, tp, np.asarray(shares))
            kept = _shorter(part["stage_s"]) if pp is None else np.broadcast_to(every == pp, part["stage_s"].shape)
            part["stage_s"] = part["stage_s"] * longest
            parts.append({field: column[kept] for field, column in part.items()})
            kept_pp = np.broadcast_to(every, kept.shape)[kept]
            keys.append(np.stack([np.full(len(kept_pp), size), np.full(len(kept_pp), tp), kept_pp]))
    columns = {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    return UnitOptions(name, side, *np.concatenate(keys, axis=1), **columns)


def longest_of(values: Float64Array, most: int) -> Float64Array:
    """Expected largest of 1, 2, ..., `most` draws from the values: [most].

    More than _NUM_QUANTILES values are replaced by means of neighbours.

    Example:
        >>> longest_of(np.array([0.0, 1.0]), 3).tolist()
        [0.5, 0.75, 0.875]
    """
    ordered = np.sort(values)
    starts = np.arange(min(len(values), _NUM_QUANTILES)) * len(values) // min(len(values), _NUM_QUANTILES)
    below = np.append(starts, len(values)) / len(values)
    means = np.add.reduceat(ordered, starts) / np.diff(below) / len(values)
    longest: Float64Array = np.diff(below ** np.arange(1, most + 1)[:, None], axis=1) @ means
    return longest


def _shorter(stage_s: Float64Array) -> BoolArray:
    """Whether the slowest stage of a pipeline is faster than those of all shorter pipelines: [..., num_blocks]."""
    before = np.minimum.accumulate(stage_s, axis=-1)
    first = np.full((*stage_s.shape[:-1], 1), np.inf)
    faster: BoolArray = stage_s < np.concatenate([first, before[..., :-1]], axis=-1) * (1 - 1e-9)
    return faster


def _of_costs(job: Job, name: str, size: int, tp: int, shares: Float64Array) -> dict[str, Float64Array]:
    """Columns of `UnitOptions` by share recomputed and PP: [num_shares, num_blocks] each."""
    costs = job.block_costs(name, size, tp)
    num_blocks, precision = costs.num_blocks, job.mixed_precision(pipeline=True)
    block_s = costs.forward_s + costs.backward_s + shares[:, None] * costs.recompute_s
    kept = costs.kept_bytes - shares[:, None] * costs.saved_bytes
    num_parameters, num_trainable = _fullest(np.stack([costs.parameters, costs.trainable]))
    pp = np.arange(1, num_blocks + 1)
    fixed = num_parameters * precision.stored + num_trainable * precision.gradient + _transient(job, name, size, tp)
    shape = block_s.shape
    return {
        "pass_s": block_s.sum(axis=1)[:, None] + 2 * (pp - 1) * _send_s(job, costs),
        "stage_s": slowest_stage_s(block_s),
        "once_s": np.broadcast_to(_once_s(job, tp, num_parameters, num_trainable), shape),
        "fixed_bytes": np.broadcast_to(fixed, shape),
        "sharded_bytes": np.broadcast_to(
            num_trainable * precision.optimizer + (num_parameters - num_trainable) * precision.master, shape
        ),
        "kept_bytes": kept.cumsum(axis=1)[:, _stage_blocks(num_blocks) - 1],
    }


def _stage_blocks(num_blocks: int) -> Int64Array:
    """ceil(num_blocks / PP) for PP 1, 2, ..., num_blocks."""
    return -(-num_blocks // np.arange(1, num_blocks + 1))


def _fullest(columns: Float64Array) -> Float64Array:
    """The most that any ceil(blocks / PP) neighbours have, by PP: [num_columns, num_blocks]."""
    prefix = np.concatenate([np.zeros((len(columns), 1)), columns.cumsum(axis=1)], axis=1)
    num_blocks = columns.shape[1]
    by_length = [(prefix[:, length:] - prefix[:, :-length]).max(axis=1) for length in range(1, num_blocks + 1)]
    return np.stack(by_length, axis=1)[:, _stage_blocks(num_blocks) - 1]


def _transient(job: Job, name: str, size: int, tp: int) -> int:
    """Bytes that the largest layer holds for a moment beside what is kept, if it is recomputed. Cached."""
    key = "transient", name, size, tp
    if key not in job.of_any_cluster:
        job.of_any_cluster[key] = _largest_transient(job, name, size, tp)
    transient: int = job.of_any_cluster[key]
    return transient


def _largest_transient(job: Job, name: str, size: int, tp: int) -> int:
    num_blocks = len(job.model.module(name).blocks)
    unit, precision = Unit(name, ({name: num_blocks},), tp=tp), job.mixed_precision(pipeline=True)

    def rows(module: str, layer: Layer) -> float:
        most = float(job.work(module, layer, size).rows.max())
        return min(most, MAX_LOGITS / layer.output_width) if layer.targets_only else most

    layers = set(stage_layers(job.model, {name: (0, num_blocks)}, {name: num_blocks}))
    return max(stage_memory(unit, [placed], rows, 0, precision).transient for placed in layers)


def _send_s(job: Job, costs: BlockCosts) -> float:
    """Seconds of a block's output to the next stage; between nodes, if there are several."""
    ranks = (0, min(job.cluster.ranks_per_node, job.cluster.num_ranks - 1))
    if ranks[1] == 0:
        return 0.0
    return float(job.cost.send_seconds(np.array([costs.output_bytes.mean()]), ranks)[0])


def _once_s(job: Job, tp: int, num_parameters: Float64Array, num_trainable: Float64Array) -> Float64Array:
    """Seconds in which the replicas of the fullest stage gather its parameters and reduce its gradients."""
    precision = job.mixed_precision(pipeline=True)
    ranks = range(0, job.cluster.num_ranks, tp)[:_NUM_REPLICAS]
    s_per_byte = job.cost.gather_seconds(1e9, ranks) / 1e9 if len(ranks) > 1 else 0.0
    return s_per_byte * (num_parameters * precision.compute + num_trainable * precision.gradient)
