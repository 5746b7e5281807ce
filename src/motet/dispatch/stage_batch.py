"""The RankBatch of a rank that holds a part of the model: what its stages need of one microbatch, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from motet.assign.orchestrator import Decision
from motet.core.arrays import Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BACKBONE, BatchLengths
from motet.dispatch.batch import PackedSequences, RankBatch, check_lengths, pack, stacked_media


def assemble_stages(
    decision: Decision,
    lengths: BatchLengths,
    replicas: Mapping[str, int],
    sequences: Sequence[TokenSequence] | None,
    media: Mapping[str, Sequence[Media]],
    sizes: Mapping[str, Int64Array],
) -> RankBatch:
    """The RankBatch of a rank whose stages run parts of modules. It has no routes: the Program's messages move rows.

    replicas:  module -> the replica that this rank is part of, for the modules that it runs a part of.
    sequences: those of the replica, in its order; None if the rank embeds no tokens and takes no loss. Its sequences
               have their extents then, and neither tokens nor targets.
    media:     items of the replica, in its order, of the encoders whose first block the rank has.
    sizes:     phase -> sizes of all items of the microbatch, int64 [num_items, size_dim].
    Raises ValueError where what was loaded differs from what `lengths` says.
    """
    values = {}
    for phase in lengths.items:
        if phase in replicas:
            of_replica = decision.assignments[phase].on_rank(replicas[phase])
            if phase in media and len(media[phase]) != len(of_replica):
                raise ValueError(f"{len(media[phase])} items of phase {phase!r} were loaded, not {len(of_replica)}")
            values[phase] = (
                stacked_media(media[phase])
                if phase in media
                else (torch.empty(0, 0), torch.from_numpy(np.ascontiguousarray(sizes[phase][of_replica])))
            )
    examples = decision.backbone.on_rank(replicas[BACKBONE]) if BACKBONE in replicas else np.zeros(0, np.int64)
    if sequences is None:
        packed = _extents(lengths.sequence[examples])
    else:
        packed = pack(
            sequences, {phase: _rows(decision, lengths, phase, replicas[BACKBONE]) for phase in lengths.items}
        )
        check_lengths(packed, lengths, examples)
    return RankBatch(packed, values, {}, lengths, decision)


def _rows(decision: Decision, lengths: BatchLengths, phase: str, replica: int) -> Int64Array:
    """Rows of each item of a phase in the sequences of a replica, in their order."""
    items = lengths.items[phase]
    ranks, order = decision.backbone.follow(items.example)
    return items.num_tokens[order[ranks[order] == replica]]


def _extents(rows: Int64Array) -> PackedSequences:
    """Sequences of these lengths without tokens. rows: int64 [num_sequences]."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32))
    return PackedSequences(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), offsets, {})
