"""Runs of rows that attend without a mask on CPUs: each sees what the one before it sees, or that and one key more.

Such runs stand in whole documents, and in the fragments of a sequence that ranks share. A causal one sees some keys
whole, and as many as it has rows in a triangle; a kernel takes either without a mask. Each gives the logarithm of its
sum of exponents, by which both parts are joined, as ring attention joins blocks (Liu et al. 2023, arXiv:2310.01889).
Masks of tiles made the fragments of a cut sequence take up to 1.4 times their share of the whole one's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.core.attention_table import AttentionTable

_SHORTEST = 64
"""Rows of a run from which on two calls take less than a mask."""


class RowRun(NamedTuple):
    """The rows first to last (exclusive) of a table; is_causal: each sees one key more than the row before it."""

    first: int
    last: int
    is_causal: bool


def row_runs(table: AttentionTable) -> list[RowRun]:
    """The runs of _SHORTEST rows or more in a table, in order. O(rows)."""
    if len(table.start) != 1 or table.num_rows < _SHORTEST:
        return []
    start, end = table.start[0], table.end[0]
    stays = (np.diff(start) == 0) & (np.diff(table.document) == 0) & (start < end)[:-1]
    steps = np.where(stays, np.diff(end), -1)  # from each row to the next
    bounds = np.append(np.flatnonzero(np.diff(steps, prepend=-2)), len(steps))
    runs: list[RowRun] = []
    for begin, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        # A row between two runs belongs to the former.
        first = max(begin, runs[-1].last) if runs else begin
        if steps[begin] in (0, 1) and stop + 1 - first >= _SHORTEST:
            runs.append(RowRun(first, stop + 1, bool(steps[begin])))
    return runs


def attend_causal_run(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, keys, head_dim] -> the shape of the query.

    Row i sees all keys but the last rows - 1 - i. On the CPU; keys are at least as many as rows.
    """
    attended: Tensor = _CausalRun.apply(query, key, value, scale)
    return attended


def _parts(query: Tensor, *keys: Tensor) -> list[tuple[list[Tensor], bool]]:
    """What a kernel takes at once of keys and values, and whether it is a triangle."""
    before = keys[0].shape[2] - query.shape[2]
    triangle = [x.narrow(2, before, query.shape[2]) for x in keys], True
    return [([x.narrow(2, 0, before) for x in keys], False), triangle] if before else [triangle]


class _CausalRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        made = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *part, 0.0, is_causal, scale=scale)
            for part, is_causal in _parts(query, key, value)
        ]
        out, logs = made[0] if len(made) == 1 else _joined(made)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        # With the output and the sum over all keys, the kernel gives the gradients of each part.
        of_query, *of_keys = zip(
            *(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    gradient, query, *part, out, logs, 0.0, is_causal, scale=ctx.scale
                )
                for part, is_causal in _parts(query, key, value)
            ),
            strict=True,
        )
        both = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in of_keys)
        return (of_query[0] if len(of_query) == 1 else of_query[0] + of_query[1], *both, None)


def _joined(made: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output [1, heads, rows, head_dim] and the logarithms [1, heads, rows] of two parts of the keys together."""
    (one, one_log), (other, other_log) = made
    logs = torch.logaddexp(one_log, other_log)
    weights = ((each - logs).exp()[..., None] for each in (one_log, other_log))
    first, second = (weight * out for weight, out in zip(weights, (one, other), strict=True))
    return (first + second).to(one.dtype), logs
