"""The merge of encoder rows into the embeddings of the backbone's sequences.

A recipe or code can replace `merge_rows` by a function of the same arguments (`models/callbacks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

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
        embeds = embeds.index_add(0, places_of(name, features[name], sequences), features[name])
    return embeds


def places_of(name: str, rows: Tensor, sequences: Sequences) -> Tensor:
    """The positions of an encoder's rows, int64 [num_rows]. Raises ValueError if they are not as many."""
    positions = sequences.feature_positions.get(name)
    if positions is None:
        positions = torch.empty(0, dtype=torch.int64, device=rows.device)
    if len(positions) != len(rows):
        raise ValueError(f"{len(rows)} feature rows of {name!r} for {len(positions)} places in the sequences")
    return positions
