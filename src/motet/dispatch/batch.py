"""What one rank computes in one microbatch: packed sequences, media, and the Routes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from motet.absent import take_part
from motet.ahead import MadeAhead
from motet.assign.orchestrator import Decision
from motet.core.arrays import BoolArray, Int64Array, rows_of_runs
from motet.core.example import Media, TokenSequence
from motet.core.grid_positions import KEYS, grid_positions
from motet.core.workload import BACKBONE, BatchLengths
from motet.dispatch.context import ContextShare
from motet.dispatch.cut_batch import examples_to_lay_out, route_to_fragments, shared_out
from motet.dispatch.exchange import exchange, exchange_rows
from motet.dispatch.route import GatherRoute, Route, compose_route
from motet.dispatch.shared_items import SharedItems, shared_items
from motet.dropout import item_keys
from motet.on_device import on_device

_NO_TARGET = -100
"""The label of a token on which no loss is taken: `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Zero or more interleaved sequences, one after the other, without padding.

    tokens:            LongTensor [total]; any valid id where a feature row goes.
    targets:           BoolTensor [total]; the loss counts the prediction of tokens[t] where targets[t].
    offsets:           IntTensor on the CPU [num_sequences + 1]; sequence i is tokens[offsets[i]:offsets[i + 1]].
    feature_positions: per phase, LongTensor [rows]; the place of each row of the phase's features; ascending, but for
                       generators that are given turns: items of one answer have the same rows.
    context:           the rows of this rank, where context-parallel ranks share the sequences: tokens, targets and
                       positions are of its rows, and offsets of all; None: this rank has all rows.
    num_targets:       int64 [num_sequences] on the CPU, without first tokens, where the rank may have no tokens; None:
                       `targets` says it.
    grid_positions:    LongTensor on the CPU [3, total], each row's time, row and column (`core/grid_positions.py`), for
                       a backbone whose positions are those of a grid; None: no item of the sequences has a grid.
    key_rows:          LongTensor on the CPU [total], where items' rows are keys of some layers and stand at no place of
                       the sequence (`models/key_items.py`): at an item's token how many of them text sees, else 0.
    turn_rows:         phase -> the rows of the turn that each of its items reads, int64 [num_items], of generators that
                       are given turns.
    host:              the same sequences on the CPU, where these are on a device or in pinned memory: who reads values
                       there does not wait for the device.

    Example:
        >>> text = TokenSequence(np.array([7, 0, 9]), np.array([False, False, True]), ("image",), np.array([1]))
        >>> packed = pack([text], {"image": np.array([3])})  # the image takes 3 rows
        >>> packed.tokens.tolist(), packed.offsets.tolist()
        ([7, 0, 0, 0, 9], [0, 5])
        >>> packed.feature_positions["image"].tolist()
        [1, 2, 3]
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]
    context: ContextShare | None = None
    num_targets: Tensor | None = None
    grid_positions: Tensor | None = None
    key_rows: Tensor | None = None
    turn_rows: Mapping[str, Int64Array] = field(default_factory=dict)
    host: PackedSequences | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences of this rank."""
        return len(self.offsets) - 1

    @cached_property
    def num_rows(self) -> int:
        """Rows of all sequences, also where this rank has no tokens, or others have some of the rows."""
        return int(self.offsets.numpy()[-1])

    @property
    def num_tokens(self) -> int:
        """Rows that are here, text and media."""
        return len(self.tokens)

    @property
    def position_ids(self) -> Tensor:
        """Positions that count from 0 in each sequence, LongTensor [total], on the device of the tokens.

        HF models take `position_ids[None]`. They see where sequences begin only with `use_cache=False` and without an
        attention mask.
        """
        lengths = self.offsets.diff().long()
        starts = torch.repeat_interleave(self.offsets[:-1].long(), lengths, output_size=self.num_tokens)
        return on_device(torch.arange(self.num_tokens) - starts, self.tokens.device)

    @property
    def cu_seqlens(self) -> Tensor:
        """`offsets` on the device of the tokens, IntTensor [num_sequences + 1], as variable-length kernels take it."""
        return on_device(self.offsets, self.tokens.device)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence; 0 without sequences."""
        return max(self.offsets.diff().tolist(), default=0)

    @property
    def labels(self) -> Tensor:
        """The tokens, and -100 where no loss is taken, LongTensor [total]; not shifted, as HF models take labels.

        No label stands at the first token of a sequence, so no sequence is asked for the first token of the next.
        """
        return self.tokens.masked_fill(~self.targets, _NO_TARGET)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedSequences:
        """The same sequences on `device`, but for the tensors that stay on the CPU."""
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedSequences:
        """The same sequences in pinned memory, but for the tensors that stay on the CPU."""
        return self.with_tensors(lambda tensor: tensor.pin_memory())

    def of(self, numbers: Int64Array) -> PackedSequences:
        """Some of the sequences, in this order, int64 [n], where this rank has all rows; of turns it says nothing."""
        offsets = self.offsets.numpy().astype(np.int64)
        counts = np.diff(offsets)[numbers]
        rows = rows_of_runs(offsets[numbers], counts)
        stands_at = np.full(int(offsets[-1]), -1, dtype=np.int64)
        stands_at[rows] = np.arange(len(rows))
        positions = {phase: stands_at[places.numpy()] for phase, places in self.feature_positions.items()}
        here = torch.from_numpy(rows)
        return PackedSequences(
            self.tokens[here],
            self.targets[here],
            torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)),
            {phase: torch.from_numpy(np.sort(places[places >= 0])) for phase, places in positions.items()},
            num_targets=None if self.num_targets is None else self.num_targets[torch.from_numpy(numbers)],
            grid_positions=None if self.grid_positions is None else self.grid_positions[:, here],
            key_rows=None if self.key_rows is None else self.key_rows[here],
        )

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedSequences:
        """Apply `change` to all tensors but those that stay on the CPU, as shapes are computed from them."""
        return replace(
            self,
            tokens=change(self.tokens),
            targets=change(self.targets),
            feature_positions={phase: change(positions) for phase, positions in self.feature_positions.items()},
            context=None if self.context is None else self.context.with_tensors(change),
            host=self.host or self,
        )


def pack(sequences: Sequence[TokenSequence], num_tokens: Mapping[str, Int64Array]) -> PackedSequences:
    """Pack sequences in the given order and replace each placeholder by as many rows as its item takes.

    Items of several phases with one placeholder have their rows at the same places. Of an item with several
    placeholders each takes as many rows. An item that reads a turn takes none: its rows are those of the turn.

    num_tokens: per phase, int64 [num_items]: the rows of its items in order. Phases without items are listed too.
    Neither a placeholder nor the first token of a sequence is a target: nothing predicts them.
    Raises ValueError for a placeholder of an unknown phase, where a phase has more or fewer items than placeholders,
    where an item's rows are not dealt evenly, or are not those of its turn, and where items have a grid of other rows,
    or only some have one.
    """
    tokens = np.concatenate([sequence.tokens for sequence in sequences] or [np.empty(0, np.int64)])
    targets = np.concatenate([sequence.targets for sequence in sequences] or [np.empty(0, np.bool_)])
    text_lengths = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int64)
    placeholders = _Placeholders.of(sequences, np.cumsum(text_lengths) - text_lengths)
    repeats = placeholders.repeats(num_tokens, len(tokens))
    targets[placeholders.at] = False

    # Text token t becomes the packed rows starts[t] to starts[t + 1].
    starts = np.concatenate([[0], np.cumsum(repeats)])
    positions = {phase: placeholders.rows(phase, starts) for phase in num_tokens}
    turns = placeholders.turns_read(num_tokens, starts)
    positions |= {phase: np.concatenate([np.arange(*turn) for turn in of_items]) for phase, of_items in turns.items()}
    offsets = starts[np.concatenate([[0], np.cumsum(text_lengths)]).astype(np.int64)]
    packed_targets = np.repeat(targets, repeats)
    packed_targets[offsets[:-1][np.diff(offsets) > 0]] = False
    grids, key_rows = _grids(sequences, placeholders.at), None
    if grids is not None and (grids[:, 4] == KEYS).all():
        key_rows = torch.zeros(len(packed_targets), dtype=torch.int64)
        key_rows[torch.from_numpy(starts[placeholders.at])] = torch.from_numpy(grids[:, 0])
        grids = None
    return PackedSequences(
        tokens=torch.from_numpy(np.repeat(tokens, repeats)),
        targets=torch.from_numpy(packed_targets),
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        feature_positions={phase: torch.from_numpy(places) for phase, places in positions.items()},
        grid_positions=None
        if grids is None
        else torch.from_numpy(grid_positions(text_lengths, placeholders.at, repeats, grids)),
        key_rows=key_rows,
        turn_rows={phase: of_items[:, 1] - of_items[:, 0] for phase, of_items in turns.items()},
    )


@dataclass(frozen=True, eq=False)
class _Placeholders:
    """The placeholders of sequences one after the other, and the items that they stand for, each for one or several.

    at:       the text token that each is, int64 [num_placeholders].
    phases:   the phase of each, object [num_placeholders].
    of_items: the phase of each item, object [num_items].
    pieces:   the placeholders of each item, int64 [num_items].
    reads:    whether each item reads a turn, bool [num_items].
    turns:    the text tokens [start, end) of each item's turn, int64 [num_items, 2]; None where none reads one.
    """

    at: Int64Array
    phases: NDArray[np.object_]
    of_items: NDArray[np.object_]
    pieces: Int64Array
    reads: BoolArray
    turns: Int64Array | None

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], text_starts: Int64Array) -> _Placeholders:
        """text_starts: the first text token of each sequence, int64 [num_sequences]."""
        begun = list(zip(text_starts, sequences, strict=True))
        of_items = np.array([phase for sequence in sequences for phase in sequence.media], dtype=object)
        pieces = np.concatenate([sequence.num_pieces for sequence in sequences] or [np.empty(0, np.int64)])
        reads = np.concatenate([sequence.reads_turn for sequence in sequences] or [np.empty(0, np.bool_)])
        return cls(
            np.concatenate([start + each.media_positions for start, each in begun] or [np.empty(0, np.int64)]),
            np.repeat(of_items, pieces),
            of_items,
            pieces,
            reads,
            np.concatenate([start + each.item_turns for start, each in begun]) if reads.any() else None,
        )

    def repeats(self, num_tokens: Mapping[str, Int64Array], num_text: int) -> Int64Array:
        """The rows that each text token becomes, int64 [num_text]. num_tokens, errors: as of `pack`."""
        if unknown := set(self.phases) - num_tokens.keys():
            raise ValueError(f"sequences have placeholders of unknown phases {sorted(unknown)}")
        repeats, by_placeholder = np.ones(num_text, dtype=np.int64), {}
        for phase, rows in num_tokens.items():
            is_own = self.of_items == phase
            own = self.pieces[is_own]
            if len(own) != len(rows):
                raise ValueError(f"{len(own)} placeholders of phase {phase!r}, {len(rows)} items")
            if (rows % own).any():
                raise ValueError(f"items of phase {phase!r} have {rows.tolist()} rows for {own.tolist()} placeholders")
            by_placeholder[phase] = np.repeat(np.where(self.reads[is_own], 0, rows) // own, own)
            repeats[self.at[self.phases == phase]] = by_placeholder[phase]
        for phase, rows in by_placeholder.items():
            if (repeats[self.at[self.phases == phase]] != rows).any():
                raise ValueError(f"items of phase {phase!r} share a placeholder with items of another number of rows")
        return repeats

    def rows(self, phase: str, starts: Int64Array) -> Int64Array:
        """The packed rows of a phase's items, int64 [n]. starts: the first packed row of each text token."""
        spans = [np.arange(starts[token], starts[token + 1]) for token in self.at[self.phases == phase]]
        return np.concatenate(spans or [np.empty(0, np.int64)])

    def turns_read(self, num_tokens: Mapping[str, Int64Array], starts: Int64Array) -> dict[str, Int64Array]:
        """Phase whose items read turns -> the packed rows [start, end) of each, int64 [num_items of the phase, 2]."""
        if self.turns is None:
            return {}
        found = {}
        for phase in dict.fromkeys(self.of_items[self.reads]):
            is_own = self.of_items == phase
            found[phase] = starts[self.turns[is_own]]
            rows = found[phase][:, 1] - found[phase][:, 0]
            if not (self.reads[is_own].all() and np.array_equal(rows, num_tokens[phase])):
                raise ValueError(
                    f"items of phase {phase!r} read turns of {rows.tolist()} rows, not of {num_tokens[phase].tolist()}"
                )
        return found


def _grids(sequences: Sequence[TokenSequence], placeholders: Int64Array) -> Int64Array | None:
    """The grids of all placeholders, int64 [num_placeholders, 5]; None: they have none."""
    with_items = [sequence for sequence in sequences if sequence.media]
    grids = [sequence.grids for sequence in with_items if sequence.grids is not None]
    if not grids:
        return None
    if len(grids) < len(with_items):
        raise ValueError("only some of the sequences with items have grids")
    of_items = np.concatenate(grids)
    if len(placeholders) != len(of_items):
        raise ValueError(f"{len(of_items)} items with grids have {len(placeholders)} placeholders")
    return of_items


@dataclass(frozen=True, eq=False)
class RankBatch:
    """What one rank computes of one microbatch, and what all ranks know of the whole microbatch.

    sequences: the sequences that this rank runs through the backbone, in the order of their positions on the rank.
    media:     per phase, values [rows, row_dim] and sizes LongTensor on the CPU [num_items, size_dim] of the items that
               this rank encodes, in the order of their positions on the rank; both are [0, 0] where it has none.
    shared:    of the phases of which ranks share items, the rows that this rank has; `media` has no others, and sizes
               of whole items, also of those that it shares.
    routes:    per phase, how this rank's encoder outputs reach the backbone.
    lengths, decision: of the whole microbatch, the same on all ranks.
    recompute: per module, the number of its first blocks that this rank recomputes in backward; None: as in every
               microbatch.
    predicted_bytes: this rank's peak, with that recomputation; 0: it was not predicted.
    rank:      this rank.
    group:     moves encoder outputs between ranks; it is needed by `insert_features` alone.
    num_step_targets: tokens on which loss is taken, over all ranks and all microbatches of the step; None: the step has
               this microbatch alone.
    num_microbatches: of the step.
    ends_step: whether it is the last microbatch of its step, behind which the optimizer steps.
    item_rows: per phase, the rows of the backbone's sequences that each item here gives them, or is given of them,
               int64 [num_items].
    ahead:     what modules have made of its lengths and places (`motet/ahead.py`), also of copies on a device.
    draws:     module -> the key of each of its sequences or items here, int64, by which dropout is drawn
               (`motet/dropout.py`); None: torch's generators draw it.

    Example:
        >>> from motet.dispatch import Orchestrator, Packed
        >>> lengths = BatchLengths(np.array([5, 3]), np.array([4, 2]), np.array([0, 1], np.int32), {})
        >>> decision = Orchestrator({"backbone": Packed()}, 2, {"backbone"}).decide(lengths)
        >>> text = TokenSequence(np.arange(5), np.ones(5, bool), (), np.array([], int))  # example 0, for rank 0
        >>> batch = assemble(decision, lengths, 0, [text], {})
        >>> batch.sequences.num_tokens, batch.num_tokens  # of rank 0, of both ranks
        (5, 8)
    """

    sequences: PackedSequences
    media: dict[str, tuple[Tensor, Tensor]]
    routes: dict[str, Route | GatherRoute]
    lengths: BatchLengths
    decision: Decision
    recompute: Mapping[str, int] | None = None
    predicted_bytes: float = 0.0
    rank: int = 0
    group: dist.ProcessGroup | None = None
    num_step_targets: int | None = None
    num_microbatches: int = 1
    ends_step: bool = True
    draws: Mapping[str, Int64Array] | None = None
    shared: Mapping[str, SharedItems] = field(default_factory=dict)
    item_rows: Mapping[str, Int64Array] = field(default_factory=dict)
    ahead: MadeAhead = field(default_factory=MadeAhead)

    def inputs(self, phase: str) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, SharedItems]:
        """What the encoder of a phase is called with."""
        return (*self.media[phase], self.shared[phase]) if phase in self.shared else self.media[phase]

    def with_draws(self, keys: Int64Array, replicas: Mapping[str, int] | None = None) -> RankBatch:
        """The same batch, with dropout drawn by item. keys: of its examples, int64 [num_examples], of all ranks.

        replicas: as of `assemble_stages`; None: this rank computes whole modules.
        """
        if replicas is None:
            replicas = dict.fromkeys([*self.lengths.items, BACKBONE], self.rank)
        of_items = {
            phase: item_keys(keys, self.lengths.items[phase].example, self.decision.items_on(phase, replica))
            for phase, replica in replicas.items()
            if phase != BACKBONE
        }
        of_sequences = {BACKBONE: keys[self.decision.sequences_on(replicas[BACKBONE])]} if BACKBONE in replicas else {}
        return replace(self, draws=of_items | of_sequences)

    def sharing(
        self, group_of: Callable[[str], dist.ProcessGroup | None], of_cuts: dist.ProcessGroup | None = None
    ) -> RankBatch:
        """The same batch, whose sequences and items the ranks of a group share, where other ranks share any.

        group_of: phase -> the ranks that share its items, and of the backbone sequences.
        of_cuts:  those that share sequences, or items, where some are cut over replicas, if these are others.
        """
        context, sequences = self.sequences.context, self.sequences
        groups = {
            phase: of_cuts or group_of(phase) if self.decision.is_over_all(phase) else group_of(phase)
            for phase in self.shared
        }
        is_cut = of_cuts is not None and self.decision.cuts is not None
        of_sequences = None if context is None else of_cuts if is_cut else group_of(BACKBONE)
        if (context is None or context.group is of_sequences) and all(
            items.group is groups[phase] for phase, items in self.shared.items()
        ):
            return self
        if context is not None:
            sequences = replace(sequences, context=replace(context, group=of_sequences))
        shared = {phase: replace(items, group=groups[phase]) for phase, items in self.shared.items()}
        return replace(self, sequences=sequences, shared=shared, ahead=MadeAhead())  # What was made has other groups.

    @property
    def shared_bytes(self) -> float:
        """Bytes of rows that this rank has given to others that share sequences or items with it."""
        context = self.sequences.context
        sharing = [*self.shared.values(), *([] if context is None else [context])]
        return sum(sum(each.sent) for each in sharing)

    @property
    def num_targets(self) -> int:
        """Tokens on which loss is taken, over all ranks."""
        return int(self.lengths.num_targets.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the backbone's sequences, over all ranks."""
        return int(self.lengths.sequence.sum())

    def has(self, phase: str) -> bool:
        """Whether any rank has an item of an encoder phase; all ranks get the same answer, and leave it out alike."""
        return self.lengths.items[phase].num_items > 0

    @property
    def num_targets_of_rank(self) -> int:
        """Tokens on which loss is taken, in this rank's sequences, or in those of their rows that it has."""
        if (context := self.sequences.context) is not None:
            return len(context.labels)
        return int(self.lengths.num_targets[self.decision.backbone.on_rank(self.rank)].sum())

    def scale_sum(self, loss: Tensor) -> Tensor:
        """From the loss summed over this rank's targets, the loss of which to take gradients.

        DDP, FSDP, accelerate and HF Trainer average gradients over ranks. The average over ranks of what this returns,
        added up over the microbatches of the step, is the loss of one process: the mean over all targets of the step.
        The factor is num_ranks / targets of the step. Where a trainer divides by the number of microbatches as well
        (accelerate does), multiply by that number.
        """
        targets = self.num_targets if self.num_step_targets is None else self.num_step_targets
        return loss * (self.decision.backbone.num_ranks / max(targets, 1))

    def scale_mean(self, loss: Tensor) -> Tensor:
        """As `scale_sum`, from the mean over this rank's targets; such a mean is nan on a rank without targets."""
        if self.num_targets_of_rank == 0:
            if loss.grad_fn is not None:
                # Where a loop divides by its 0 targets itself, the zero that goes back would become nan there.
                loss.grad_fn.register_hook(_zeros)
            return loss.nan_to_num() * 0
        return self.scale_sum(loss * self.num_targets_of_rank)

    def insert_features(self, embeds: Tensor, phase: str, encoder: nn.Module) -> Tensor:
        """Encode this rank's items of a phase, and return `embeds` with the features of its sequences' items in place.

        embeds:  [sequences.num_tokens, dim], of the backbone's tokens; rows at placeholders are replaced.
        encoder: called as encoder(values, sizes) with `media[phase]`; returns [rows, dim], the rows of each item in
                 order. A rank without items does not call it: its parameters take part (`take_part`). Only a module
                 with parts that FSDP shards is called without items too, with values and sizes [0, 0]: FSDP's
                 collectives start in it, so it must return [0, dim].
        A collective, also in backward, unless all items are encoded on the rank of their sequence. The result must be
        part of the rank's loss, also without tokens.
        Raises ValueError if the encoder returns another number of rows than the lengths say.
        """
        trains = any(parameter.requires_grad for parameter in encoder.parameters())
        is_sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in encoder.modules())
        if not self.has(phase):
            # No rank calls the encoder. DDP waits for its gradients all the same, FSDP does not.
            return embeds if is_sharded else take_part(embeds, encoder.parameters())
        values, sizes = self.media[phase]
        if len(sizes) or is_sharded:
            rows = encoder(values, sizes).to(embeds.dtype)
        else:
            rows = take_part(embeds.new_zeros(0, embeds.shape[1]), encoder.parameters())
        move = exchange if trains else exchange_rows
        return embeds.index_copy(0, self.sequences.feature_positions[phase], move(rows, self.routes[phase], self.group))

    def to(
        self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> RankBatch:
        """The same batch on `device`; media values are cast to `dtype` if it is given (they are loaded as float32)."""
        return replace(
            self,
            sequences=self.sequences.to(device, non_blocking=non_blocking),
            media={
                phase: (values.to(device, dtype, non_blocking=non_blocking), sizes)
                for phase, (values, sizes) in self.media.items()
            },
            routes={phase: route.to(device, non_blocking=non_blocking) for phase, route in self.routes.items()},
        )

    def ready_for(self, device: torch.device) -> RankBatch:
        """The same batch where a copy to `device` that does not block starts at once: for a GPU in pinned memory."""
        return self.pin_memory() if device.type == "cuda" else self

    def pin_memory(self) -> RankBatch:
        """The same batch in pinned memory, except for sizes and offsets."""
        return replace(
            self,
            sequences=self.sequences.pin_memory(),
            media={phase: (values.pin_memory(), sizes) for phase, (values, sizes) in self.media.items()},
            routes={phase: route.pin_memory() for phase, route in self.routes.items()},
        )


def _zeros(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def assemble(
    decision: Decision,
    lengths: BatchLengths,
    rank: int,
    sequences: Sequence[TokenSequence],
    media: Mapping[str, Sequence[Media]],
    *,
    shared: Mapping[int, TokenSequence] = MappingProxyType({}),
) -> RankBatch:
    """The RankBatch of one rank, made of what the rank has loaded or received.

    sequences: those of the examples `decision.sequences_on(rank)`, in that order.
    media:     per phase, the items `decision.items_on(phase, rank)`, in that order.
    shared:    those of the examples that `examples_to_lay_out` names.
    Raises ValueError where they differ from what `lengths` says: a stale index, for instance.
    """
    routes, num_tokens, values, shared_rows, item_rows = {}, {}, {}, {}, {}
    examples = decision.sequences_on(rank)
    layouts = {
        int(example): packed_alone(shared[int(example)], int(example), lengths)
        for example in examples_to_lay_out(decision.cuts, lengths)
    }
    for phase, items in lengths.items.items():
        encoder = decision.assignments[phase]
        routes[phase] = (
            compose_route(
                encoder,
                decision.backbone,
                items,
                rank,
                ranks_per_node=decision.ranks_per_node,
                communicator=decision.communicator,
            )
            if decision.cuts is None and phase not in decision.item_cuts
            else route_to_fragments(decision, lengths, phase, rank, layouts)
        )
        num_tokens[phase] = items.take(examples).num_tokens
        own = decision.items_on(phase, rank)
        if len(media.get(phase, ())) != len(own):
            raise ValueError(f"rank {rank} encodes {len(own)} items of phase {phase!r}, not {len(media[phase])}")
        values[phase], item_rows[phase] = stacked_media(media.get(phase, ())), items.num_tokens[own]
        if (of_rank := shared_items(decision, phase, items, rank)) is not None:
            shared_rows[phase], values[phase] = of_rank, rows_of_rank(*values[phase], of_rank, media[phase])
    packed = pack(sequences, num_tokens)
    check_lengths(packed, lengths, examples)
    if decision.cuts is not None:
        packed = shared_out(packed, decision, rank, lengths)
    return RankBatch(packed, values, routes, lengths, decision, rank=rank, shared=shared_rows, item_rows=item_rows)


def packed_alone(sequence: TokenSequence, example: int, lengths: BatchLengths) -> PackedSequences:
    """A sequence packed by itself. example: its number in the microbatch."""
    one = np.array([example])
    return pack([sequence], {phase: items.take(one).num_tokens for phase, items in lengths.items.items()})


def stacked_media(media: Sequence[Media]) -> tuple[Tensor, Tensor]:
    """Items one after the other: values [rows, row_dim] and sizes [num_items, size_dim], both [0, 0] without items."""
    if not media:
        return torch.empty(0, 0), torch.empty(0, 0, dtype=torch.int64)
    values = torch.from_numpy(np.concatenate([item.values for item in media]))
    return values, torch.from_numpy(np.stack([item.size for item in media]).astype(np.int64))


def rows_of_rank(values: Tensor, sizes: Tensor, shared: SharedItems, media: Sequence[Media]) -> tuple[Tensor, Tensor]:
    """The rows of whole items that are a rank's, where ranks share some. Others: as of `stacked_media`."""
    counts = np.array([len(item.values) for item in media], dtype=np.int64)
    return values[torch.from_numpy(shared.with_rows(counts).own)], sizes


def check_lengths(packed: PackedSequences, lengths: BatchLengths, examples: Int64Array) -> None:
    """Compare lengths with the data that came: a wrong length would silently give a wrong gradient.

    examples: int64 [num_sequences], those of the packed sequences. Raises ValueError.
    """
    ends = packed.offsets.numpy()
    targets = np.concatenate([[0], np.cumsum(packed.targets.numpy())])
    for name, actual, expected in (
        ("tokens", np.diff(ends), lengths.sequence[examples]),
        ("targets", targets[ends[1:]] - targets[ends[:-1]], lengths.num_targets[examples]),
    ):
        if len(actual) != len(expected):
            raise ValueError(f"{len(actual)} sequences were given where the decision puts {len(expected)}")
        if (wrong := np.flatnonzero(actual != expected)).size:
            i = wrong[0]
            raise ValueError(
                f"example {examples[i]} of the batch has {actual[i]} {name}, but its lengths say {expected[i]}"
            )
