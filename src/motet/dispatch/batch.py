"""What one rank computes in one microbatch: packed sequences, media, and the Routes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from motet.assign.orchestrator import Decision
from motet.core.arrays import Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths
from motet.dispatch.route import Route, compose_route


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Interleaved sequences one after the other, without padding; any number of them, none included.

    tokens:            LongTensor [total]; where a feature goes, any valid id.
    targets:           BoolTensor [total], loss is taken on predicting tokens[t] where targets[t].
    offsets:           IntTensor on the CPU [num_sequences + 1], sequence i is tokens[offsets[i]:offsets[i + 1]].
    feature_positions: per phase, LongTensor [rows], the place of each row of the phase's features; ascending.
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedSequences:
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedSequences:
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedSequences:
        """Changes all but `offsets`, which stay on the CPU: shapes are computed from them."""
        return replace(
            self,
            tokens=change(self.tokens),
            targets=change(self.targets),
            feature_positions={phase: change(positions) for phase, positions in self.feature_positions.items()},
        )


def pack(sequences: Sequence[TokenSequence], num_tokens: Mapping[str, Int64Array]) -> PackedSequences:
    """Pack sequences in the given order, each placeholder grown to the rows that its item takes.

    num_tokens: per phase, also one that does not occur, int64 [num_items], the rows of its items in order.
    A placeholder is never a target, nor is the first token of a sequence, which nothing predicts.
    Raises ValueError where a phase's number of items is not that of its placeholders.
    """
    tokens = np.concatenate([sequence.tokens for sequence in sequences] or [np.empty(0, np.int64)])
    targets = np.concatenate([sequence.targets for sequence in sequences] or [np.empty(0, np.bool_)])
    text_lengths = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)
    text_starts = np.cumsum(text_lengths) - text_lengths

    placeholders = np.concatenate(
        [start + sequence.media_positions for start, sequence in zip(text_starts, sequences, strict=True)]
        or [np.empty(0, np.int64)]
    )
    phases = np.array([phase for sequence in sequences for phase in sequence.media], dtype=object)
    repeats = np.ones(len(tokens), dtype=np.int64)
    if unknown := set(phases) - num_tokens.keys():
        raise ValueError(f"sequences have placeholders of unknown phases {sorted(unknown)}")
    for phase, rows in num_tokens.items():
        places = placeholders[phases == phase]
        if len(places) != len(rows):
            raise ValueError(f"{len(places)} placeholders of phase {phase!r}, {len(rows)} items")
        repeats[places] = rows
    targets[placeholders] = False

    # ends[t]: tokens of the packed sequences up to and with text token t.
    ends = np.concatenate([[0], np.cumsum(repeats)])
    positions = {}
    for phase in num_tokens:
        places = placeholders[phases == phase]
        spans = [np.arange(ends[place], ends[place + 1]) for place in places]
        positions[phase] = torch.from_numpy(np.concatenate(spans or [np.empty(0, np.int64)]))
    offsets = ends[np.concatenate([[0], np.cumsum(text_lengths)]).astype(np.int64)]
    packed_targets = np.repeat(targets, repeats)
    packed_targets[offsets[:-1][np.diff(offsets) > 0]] = False
    return PackedSequences(
        tokens=torch.from_numpy(np.repeat(tokens, repeats)),
        targets=torch.from_numpy(packed_targets),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        feature_positions=positions,
    )


@dataclass(frozen=True, eq=False)
class RankBatch:
    """All that one rank needs for one microbatch, and what is known of the microbatch as a whole.

    sequences:   the sequences that this rank runs through the backbone, in slot order.
    media:       per phase, values [rows, row_dim] and sizes LongTensor on the CPU [num_items, size_dim] of the items
                 that this rank encodes, in slot order; [0, 0] both where it has none.
    routes:      per phase, how this rank's encoder outputs reach the backbone.
    lengths, decision: of the whole microbatch, the same on all ranks.
    """

    sequences: PackedSequences
    media: dict[str, tuple[Tensor, Tensor]]
    routes: dict[str, Route]
    lengths: BatchLengths
    decision: Decision

    @property
    def num_targets(self) -> int:
        """Tokens on which loss is taken, over all ranks."""
        return int(self.lengths.num_targets.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the backbone's sequences, over all ranks."""
        return int(self.lengths.sequence.sum())

    def has(self, phase: str) -> bool:
        """Whether any rank has an item of an encoder phase: what all ranks must agree on before they leave it out."""
        return self.lengths.items[phase].num_items > 0

    def to(
        self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> RankBatch:
        """The batch on a device; with `dtype`, media values in it (float32 as loaded)."""
        return replace(
            self,
            sequences=self.sequences.to(device, non_blocking=non_blocking),
            media={
                phase: (values.to(device, dtype, non_blocking=non_blocking), sizes)
                for phase, (values, sizes) in self.media.items()
            },
            routes={phase: route.to(device, non_blocking=non_blocking) for phase, route in self.routes.items()},
        )

    def pin_memory(self) -> RankBatch:
        return replace(
            self,
            sequences=self.sequences.pin_memory(),
            media={phase: (values.pin_memory(), sizes) for phase, (values, sizes) in self.media.items()},
            routes={phase: route.pin_memory() for phase, route in self.routes.items()},
        )


def assemble(
    decision: Decision,
    lengths: BatchLengths,
    rank: int,
    sequences: Sequence[TokenSequence],
    media: Mapping[str, Sequence[Media]],
    *,
    ranks_per_node: int | None = None,
) -> RankBatch:
    """The RankBatch of one rank, from what it has loaded (or was sent).

    sequences: those of `decision.backbone.on_rank(rank)`, in that order.
    media:     per phase, those of `decision.assignments[phase].on_rank(rank)`, in that order.
    Raises ValueError where they are not what `lengths` says: a stale index, for instance.
    """
    routes, num_tokens, values = {}, {}, {}
    for phase, items in lengths.items.items():
        encoder = decision.assignments[phase]
        routes[phase] = compose_route(encoder, decision.backbone, items, rank, ranks_per_node=ranks_per_node)
        ranks, order = decision.backbone.follow(items.example)
        num_tokens[phase] = items.num_tokens[order[ranks[order] == rank]]
        if len(media.get(phase, ())) != len(encoder.on_rank(rank)):
            raise ValueError(
                f"rank {rank} encodes {len(encoder.on_rank(rank))} items of phase {phase!r}, not {len(media[phase])}"
            )
        values[phase] = _stack(media.get(phase, ()))
    packed = pack(sequences, num_tokens)
    _check(packed, lengths, decision.backbone.on_rank(rank))
    return RankBatch(packed, values, routes, lengths, decision)


def _stack(media: Sequence[Media]) -> tuple[Tensor, Tensor]:
    if not media:
        return torch.empty(0, 0), torch.empty(0, 0, dtype=torch.int64)
    values = torch.from_numpy(np.concatenate([item.values for item in media]))
    return values, torch.from_numpy(np.stack([item.size for item in media]).astype(np.int64))


def _check(packed: PackedSequences, lengths: BatchLengths, examples: Int64Array) -> None:
    """A wrong length would give a wrong gradient without a word, so lengths are held against what came."""
    ends = packed.offsets.numpy()
    targets = np.concatenate([[0], np.cumsum(packed.targets.numpy())])
    for name, found, expected in (
        ("tokens", np.diff(ends), lengths.sequence[examples]),
        ("targets", targets[ends[1:]] - targets[ends[:-1]], lengths.num_targets[examples]),
    ):
        if len(found) != len(expected):
            raise ValueError(f"{len(found)} sequences were given where the decision puts {len(expected)}")
        if (wrong := np.flatnonzero(found != expected)).size:
            i = wrong[0]
            raise ValueError(
                f"example {examples[i]} of the batch has {found[i]} {name}, but its lengths say {expected[i]}"
            )
