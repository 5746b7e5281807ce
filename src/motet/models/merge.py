"""The merge of encoder rows into the embeddings of the backbone's sequences.

A recipe or code can replace `merge_rows` by a function of the same arguments (`models/callbacks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from motet.models.contract import Sequences


def merge_rows(embeds: Tensor, features: Mapping[str, Tensor], sequences: Sequences) -> Tensor:
    """embeds [total, dim], features: encoder -> rows [n, dim] -> embeds with the rows in their places, [total, dim].

    A row takes the place of the embedding there. Rows of several encoders at one place are added.
    Also an encoder without rows stays in the graph, so that every rank runs the same backward.
    """
    positions = [sequences.feature_positions[name] for name in features if name in sequences.feature_positions]
    if positions:
        embeds = embeds.index_fill(0, torch.cat(positions), 0)
    for name in sorted(features):
        embeds = added_at(embeds, places_of(name, features[name], sequences), features[name])
    return embeds


def added_at(hidden: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """hidden [total, dim], or [1, total, dim], with rows [n, dim] added at places, int64 [n].

    `index_add` would keep the rows until backward, which reads no more of them than their shape.
    """
    added: Tensor = _AddedAt.apply(hidden, places, rows)
    return added


def places_of(name: str, rows: Tensor, sequences: Sequences) -> Tensor:
    """The positions of an encoder's rows, int64 [num_rows]. Raises ValueError if they are not as many."""
    positions = sequences.feature_positions.get(name)
    if positions is None:
        positions = torch.empty(0, dtype=torch.int64, device=rows.device)
    if len(positions) != len(rows):
        raise ValueError(f"{len(rows)} feature rows of {name!r} for {len(positions)} places in the sequences")
    return positions


class _AddedAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return hidden.index_add(-2, places, rows.reshape(*hidden.shape[:-2], *rows.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradient, None, gradient.index_select(-2, places).flatten(0, -2) if ctx.needs_input_grad[2] else None
