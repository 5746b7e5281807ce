"""Greedy answers of a sharded model, on all ranks.

All ranks append one token at a time to their unfinished sequences, by a forward pass over these sequences, packed. They
stop when no rank has an unfinished sequence. A rank that is finished before still takes part in the forward passes, as
the collectives of a sharded model need all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from motet.dispatch import PackedSequences
from motet.models.mllm import MLLM
from motet.runtime.mesh import Mesh


@torch.no_grad()
def generate(
    model: MLLM,
    prompts: PackedSequences,
    features: dict[str, Tensor],
    end_tokens: Set[int],
    max_new_tokens: int,
    mesh: Mesh,
) -> list[list[int]]:
    """Greedy answers to this rank's prompts, in tokens, each up to one of end_tokens. A collective.

    A rank may have no prompts.
    """
    sequences = [_GrowingSequence(*pieces) for pieces in _cut(prompts, features)]
    active = list(sequences)
    for _ in range(max_new_tokens):
        most_active = torch.tensor(len(active), device=mesh.device)
        dist.all_reduce(most_active, op=dist.ReduceOp.MAX, group=mesh.group)
        if not int(most_active):
            break
        packed, rows = _join(active, features, mesh.device)
        for sequence, token in zip(active, model.backbone.next_tokens(packed, rows).tolist(), strict=True):
            sequence.add(token, end_tokens)
        active = [sequence for sequence in active if not sequence.is_finished]
    return [sequence.answer for sequence in sequences]


class _GrowingSequence:
    """A prompt and the answer so far. positions, rows: phase -> where its feature rows are in tokens, and the rows.

    grid: positions of its rows on the axes of a grid, int64 [3, length]; None: its backbone counts rows.
    keys: as of `PackedSequences.key_rows`, int64 [length].
    Tokens of the answer are targets, as they are in training: a prefix ends there.
    """

    def __init__(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: dict[str, Tensor],
        rows: dict[str, Tensor],
        grid: Tensor | None,
        keys: Tensor | None,
    ) -> None:
        self.tokens, self.targets, self.positions, self.rows = tokens, targets, positions, rows
        self.grid, self.keys = grid, keys
        self.answer: list[int] = []
        self.is_finished = False

    def add(self, token: int, end_tokens: Set[int] = frozenset()) -> None:
        """Append a token, unless it is one that ends the answer."""
        if token in end_tokens:
            self.is_finished = True
            return
        self.answer.append(token)
        self.tokens = torch.cat([self.tokens, self.tokens.new_tensor([token])])
        self.targets = torch.cat([self.targets, self.targets.new_ones(1)])
        if self.grid is not None:
            # A token stands one further than all before it, on all axes.
            self.grid = torch.cat([self.grid, (self.grid.max() + 1).expand(len(self.grid), 1)], dim=1)
        if self.keys is not None:
            self.keys = torch.cat([self.keys, self.keys.new_zeros(1)])


def _cut(
    prompts: PackedSequences, features: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor], Tensor | None, Tensor | None]]:
    """The packed prompts one by one: (tokens, targets, positions of feature rows, the rows, positions on a grid, how
    many keys text sees); the third and the fourth by phase.
    """
    offsets = prompts.offsets.tolist()
    ends = {
        name: torch.searchsorted(at.cpu(), prompts.offsets.long()).tolist()
        for name, at in prompts.feature_positions.items()
    }
    pieces = []
    for i, (start, end) in enumerate(pairwise(offsets)):
        span = {name: slice(ends[name][i], ends[name][i + 1]) for name in features}
        positions = {name: prompts.feature_positions[name][span[name]] - start for name in features}
        rows = {name: features[name][span[name]] for name in features}
        grid = None if prompts.grid_positions is None else prompts.grid_positions[:, start:end]
        keys = None if prompts.key_rows is None else prompts.key_rows[start:end]
        pieces.append((prompts.tokens[start:end], prompts.targets[start:end], positions, rows, grid, keys))
    return pieces


def _join(
    active: Sequence[_GrowingSequence], features: dict[str, Tensor], device: torch.device
) -> tuple[PackedSequences, dict[str, Tensor]]:
    """The sequences packed for a forward pass, and their feature rows by phase. The inverse of `_cut`."""
    offsets = np.concatenate([[0], np.cumsum([len(sequence.tokens) for sequence in active])]).astype(np.int32)
    starts = offsets[:-1].tolist()
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    tokens = torch.cat([nothing, *(sequence.tokens for sequence in active)])
    positions = {
        name: torch.cat([nothing, *(s.positions[name] + start for s, start in zip(active, starts))])
        for name in features
    }
    rows = {name: torch.cat([features[name][:0], *(s.rows[name] for s in active)]) for name in features}
    targets = torch.cat([nothing.bool(), *(sequence.targets for sequence in active)])
    grids = [sequence.grid for sequence in active if sequence.grid is not None]
    keys = [sequence.keys for sequence in active if sequence.keys is not None]
    packed = PackedSequences(tokens, targets, torch.from_numpy(offsets), positions)
    packed = replace(packed, grid_positions=torch.cat(grids, dim=1) if grids else None)
    return replace(packed, key_rows=torch.cat(keys) if keys else None), rows
