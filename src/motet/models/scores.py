"""Attention with its scores in memory: for what no kernel computes, and for pieces that are small."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from motet.dropout import dropped_out


class Scoring(NamedTuple):
    """How scores become weights: the arguments of `TableItems.attend` behind query, key and value, in their order."""

    scale: float | None
    dropout: float
    window: int | None
    softcap: float | None = None
    sinks: Tensor | None = None


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    draws: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Query [count, heads, rows, head_dim], key and value [count, heads, keys, head_dim] -> the shape of the query.

    mask:    bool, broadcast to [count, heads, rows, keys], True where a row sees a key. A row that sees none gets 0.
    softcap: a score s becomes softcap * tanh(s / softcap) (Gemma 2).
    sinks:   [heads], a further score of each row, which takes its share of the weights and has no value (gpt-oss).
    draws:   keys by which dropout is drawn, int64 [count, heads, rows]; None: torch draws.
    columns: numbers of the keys in these draws, int64 [keys]; by default from 0.
    """
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    weights = weights.to(value.dtype)
    if draws is not None:
        weights = dropped_out(weights, draws.flatten(), dropout, columns)
    elif dropout:
        weights = torch.dropout(weights, dropout, True)
    return weights @ value
