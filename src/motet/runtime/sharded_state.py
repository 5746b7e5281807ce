"""Parameters that are whole while passes run, and stored as the optimizer has them: shared out, or in another type.

    stored: what names, checkpoints and the optimizer know: DTensors of this rank's rows, or the whole parameter, in
            `run.dtype`.
    whole:  what passes compute with, in `fsdp.param_dtype`; of a parameter that tensor-parallel ranks cut, this rank's
            part. Under ZeRO 3 its memory is there between a GATHER and the end of the pass alone (Rajbhandari et al.
            2020, section 5).

FSDP2 does this in hooks around the forward pass of a module. A stage runs parts of modules, and its Program says when
parameters are gathered and gradients reduced, so the actions of the Program call it here (docs/runtime.md).

Under ZeRO 0 and 1 this rank's gradients are rows of the whole ones, so that they are held once. Stored rows have memory
of their own: torch's checkpoints cannot copy a DTensor whose rows begin inside other memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.runtime.clip import square_sum_of_copies
from motet.runtime.holders import RankGroups, Sharing
from motet.runtime.replicas import BUCKET_BYTES
from motet.runtime.sent_bytes import SentBytes
from motet.runtime.shards import as_shard, cut_range, row_range


@dataclass(frozen=True)
class ComputeTypes:
    """The types of passes. compute: of parameters and activations. reduce: in which gradients are summed over ranks.

    None: that of the stored parameters, and that of `compute`.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def casts(self, stored: torch.dtype) -> bool:
        """Whether anything is computed or summed in another type than `stored`. Whole numbers stay what they are."""
        return stored.is_floating_point and {self.compute or stored, self.reduce or self.compute or stored} != {stored}


SAME_TYPES = ComputeTypes()
"""Everything in the type of the stored parameters."""


class ShardedState:
    """The parameters of one module that are shared alike; the ranks that share them call every method alike.

    Example, of a step under ZeRO 1:

        state.gather()
        state.use()                    # whole parameters are as the optimizer has left the stored ones
        state.zero()                   # gradients of whole parameters begin with zero
        loss.backward()
        state.start()
        state.wait()                   # gradients of stored parameters are the sums over ranks
        optimizer.step()
        state.is_updated()
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sharing: Sharing,
        rank: int,
        groups: RankGroups,
        types: ComputeTypes,
        sent: SentBytes,
    ) -> None:
        """sent: counts bytes."""
        self.sharing = sharing
        self._pieces = [_Piece(parameter, sharing, types.compute) for parameter in parameters]
        sets = sharing.shards(rank), sharing.copies(rank)
        shards, copies = (groups[ranks] if len(ranks) > 1 else None for ranks in sets)
        self._buckets = [
            _Bucket(part, sharing, shards, copies, types.reduce or types.compute, sent) for part in _parts(self._pieces)
        ]
        self._num_users = 0
        self.has_gradients = False

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(stored, whole) of each parameter."""
        return [(piece.stored, piece.whole) for piece in self._pieces]

    def gather(self) -> None:
        """Start to make whole what is not. A collective where parameters are shared out."""
        self._num_users += 1
        for bucket in self._buckets:
            bucket.gather()

    def use(self) -> None:
        """Wait for what `gather` has started."""
        for bucket in self._buckets:
            bucket.wait_for_gather()

    def release(self) -> None:
        """End the use of one `gather`: under ZeRO 3 the last one frees the whole parameters."""
        self._num_users -= 1
        if self.sharing.zero == 3 and self._num_users == 0:
            for bucket in self._buckets:
                bucket.free()

    def is_updated(self) -> None:
        """The optimizer has changed the stored parameters."""
        for bucket in self._buckets:
            bucket.is_stale |= bucket.is_trainable

    def clear(self) -> None:
        """Begin a step without gradients."""
        self.has_gradients = False
        for piece in self._pieces:
            piece.whole.grad = piece.stored.grad = None

    def zero(self) -> None:
        """Begin a step with gradients: they are zero."""
        self.has_gradients = True
        for bucket in self._trainable:
            bucket.zero()

    def collect(self) -> None:
        """Add what a backward pass has left to the gradients of the step, if those are of another type."""
        for bucket in self._trainable:
            bucket.collect()

    def start(self) -> None:
        """Start to sum over ranks what backward passes have left; under ZeRO 2 and 3 over those of one copy."""
        for bucket in self._trainable:
            bucket.collect()
            bucket.reduce()

    def start_copies(self) -> None:
        """Start to sum over copies what `start` has summed in each, under ZeRO 2 and 3."""
        for bucket in self._trainable:
            bucket.reduce_copies()

    def wait(self) -> None:
        """Until the sums are there, as the gradients of the stored parameters."""
        for bucket in self._trainable:
            bucket.wait_for_reduce()
            for piece in bucket.pieces:
                piece.stored.grad = piece.stored_gradient

    def square_sum(self, device: torch.device) -> Tensor:
        """This rank's share of the squared norm of the gradients, a float64 scalar; shares add up over all ranks."""
        sharing = self.sharing
        gradients = [_local(piece.stored.grad) for piece in self._pieces if piece.stored.grad is not None]
        num_copies = len(sharing.ranks) // sharing.shard_size * sharing.num_tensor_copies
        return square_sum_of_copies(gradients, num_copies, device)

    @property
    def _trainable(self) -> list[_Bucket]:
        return [bucket for bucket in self._buckets if bucket.is_trainable]


class _Piece:
    """One parameter. shape: of what passes use. first, stop: the rows of that which this rank stores. num_rows: of each
    rank in a message, the last ones of which may be padding.
    """

    def __init__(self, parameter: nn.Parameter, sharing: Sharing, compute: torch.dtype | None) -> None:
        self.stored, self.dtype = parameter, compute or parameter.dtype
        self.is_trainable = parameter.requires_grad
        sizes = list(parameter.shape)
        self.first, self.stop = 0, len(parameter) if sizes else 0
        if isinstance(parameter, DTensor):
            if sharing.cut is not None:
                first, stop = cut_range(sizes[sharing.cut], parameter.device_mesh)
                sizes[sharing.cut] = stop - first
            self.first, self.stop = row_range(sizes[0], parameter.device_mesh)
        self.shape = torch.Size(sizes)
        self.num_rows = -(-sizes[0] // sharing.shard_size) if sizes else 1
        self.width = self.shape[1:].numel()
        self.is_same = sharing.shard_size == 1 and self.dtype == parameter.dtype
        self.whole = parameter
        if not self.is_same:
            whole = torch.empty(self.shape, dtype=self.dtype, device=self.rows.device)
            self.whole = nn.Parameter(whole, self.is_trainable)
        elif isinstance(parameter, DTensor):
            self.whole = nn.Parameter(self.rows, self.is_trainable)  # The same memory.
        self.stored_gradient: Tensor | None = None

    def as_stored(self, rows: Tensor) -> Tensor:
        """A tensor of this rank's rows in the form of the stored parameter."""
        like = self.stored
        return as_shard(rows, like.device_mesh, like.placements, like.shape) if isinstance(like, DTensor) else rows

    @property
    def rows(self) -> Tensor:
        """The stored rows of this rank."""
        stored = self.stored.detach()
        return stored.to_local() if isinstance(stored, DTensor) else stored

    @property
    def length(self) -> int:
        """Elements of one rank in a message."""
        return self.num_rows * self.width

    def parts(self, whole: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of the same elements: of a tensor of the parameter's shape, and of a message, [num_ranks, length]."""
        whole = whole if whole.ndim else whole.view(1)
        num_full, rest = divmod(len(whole), self.num_rows)
        cut = num_full * self.num_rows
        yield whole[:cut].reshape(num_full, self.length), message[:num_full]
        if rest:
            yield whole[cut:].reshape(-1), message[num_full, : rest * self.width]


class _Bucket:
    """Parameters that have messages together."""

    def __init__(
        self,
        pieces: list[_Piece],
        sharing: Sharing,
        shards: dist.ProcessGroup | None,
        copies: dist.ProcessGroup | None,
        reduce: torch.dtype | None,
        sent: SentBytes,
    ) -> None:
        self._sent = sent
        self.pieces, self.is_trainable, self.is_stale = pieces, pieces[0].is_trainable, True
        self._size, self._shards, self._copies = sharing.shard_size, shards, copies
        self._zero, self._device = sharing.zero, pieces[0].rows.device
        self._lengths = [piece.length for piece in pieces]
        self._stored_dtype = pieces[0].rows.dtype
        self._reduce_dtype = reduce or self._stored_dtype
        self._gathered: Tensor | None = None
        self._reduced: Tensor | None = None
        self._is_of_copies = False
        self._work: list[dist.Work] = []
        self._sums: list[Tensor] = []
        if self._zero == 3:
            self.free()
        if self.is_trainable:
            self._make_gradients()

    def _make_gradients(self) -> None:
        """Tensors for gradients between passes: whole under ZeRO 0 and 1, else of this rank's rows."""
        for piece in self.pieces:
            of_rank = torch.Size((piece.stop - piece.first, *piece.shape[1:]))
            if self._zero < 2:
                self._sums.append(torch.zeros(piece.shape, dtype=self._stored_dtype, device=self._device))
                own = self._sums[-1][piece.first : piece.stop] if piece.shape else self._sums[-1]
            else:
                own = torch.zeros(of_rank, dtype=self._stored_dtype, device=self._device)
            piece.stored_gradient = piece.as_stored(own)

    @torch.no_grad()
    def gather(self) -> None:
        if not self.is_stale or self._gathered is not None:
            return
        if self._size == 1:
            for piece in self.pieces if not self.pieces[0].is_same else ():
                piece.whole.data.copy_(piece.rows)
            self.is_stale = False
            return
        own = torch.zeros(sum(self._lengths), dtype=self.pieces[0].dtype, device=self._device)
        for piece, part in zip(self.pieces, own.split(self._lengths), strict=True):
            part[: piece.rows.numel()] = piece.rows.reshape(-1)
        self._gathered = own.new_empty(self._size * len(own))
        self._sent.all_gather(self._gathered.nbytes, self._size)
        self._start(dist.all_gather_single(self._gathered, own, group=self._shards, async_op=True))

    @torch.no_grad()
    def wait_for_gather(self) -> None:
        if self._gathered is None:
            return
        self._finish()
        messages = self._gathered.view(self._size, -1).split(self._lengths, dim=1)
        for piece, message in zip(self.pieces, messages, strict=True):
            storage = piece.whole.untyped_storage()
            storage.resize_(piece.whole.numel() * piece.whole.element_size())
            for whole, part in piece.parts(piece.whole.data, message):  # Of `.data`: graphs keep the whole parameter.
                whole.copy_(part)
        self._gathered, self.is_stale = None, False

    def free(self) -> None:
        for piece in self.pieces:
            piece.whole.untyped_storage().resize_(0)
        self.is_stale = True

    def zero(self) -> None:
        for number, piece in enumerate(self.pieces):
            if self._zero < 2:
                self._sums[number].zero_()
                piece.whole.grad = self._sums[number] if piece.dtype == self._stored_dtype else None
            else:
                _local(piece.stored_gradient).zero_()

    @torch.no_grad()
    def collect(self) -> None:
        for piece, sums in zip(self.pieces, self._sums):
            if piece.dtype != self._stored_dtype and piece.whole.grad is not None:
                sums += piece.whole.grad
                piece.whole.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        self.wait_for_reduce()  # That of an earlier microbatch.
        if self._size == 1 and self._copies is None and self._reduce_dtype == self._stored_dtype:
            return  # What passes have left is the sum.
        message = torch.zeros(self._size, sum(self._lengths), dtype=self._reduce_dtype, device=self._device)
        for number, (piece, part) in enumerate(zip(self.pieces, message.split(self._lengths, dim=1), strict=True)):
            gradient = self._sums[number] if self._zero < 2 else piece.whole.grad
            for whole, to in piece.parts(gradient, part) if gradient is not None else ():
                to.copy_(whole)
            if self._zero >= 2:
                piece.whole.grad = None
        if self._size > 1:
            self._reduced = message.new_empty(message.shape[1])
            self._sent.reduce_scatter(message.nbytes, self._size)
            self._start(dist.reduce_scatter_single(self._reduced, message.view(-1), group=self._shards, async_op=True))
        else:
            self._reduced = message.view(-1)
            if self._copies is not None:
                self._sent.all_reduce(self._reduced.nbytes, self._copies.size())
                self._start(dist.all_reduce(self._reduced, group=self._copies, async_op=True))

    @torch.no_grad()
    def reduce_copies(self) -> None:
        self.wait_for_reduce()  # That of the last microbatch.
        assert self._copies is not None, "there are several copies"
        self._reduced = torch.zeros(sum(self._lengths), dtype=self._reduce_dtype, device=self._device)
        for piece, part in zip(self.pieces, self._reduced.split(self._lengths), strict=True):
            own = _local(piece.stored_gradient)
            part[: own.numel()] = own.view(-1)
        self._sent.all_reduce(self._reduced.nbytes, self._copies.size())
        self._start(dist.all_reduce(self._reduced, group=self._copies, async_op=True))
        self._is_of_copies = True

    @torch.no_grad()
    def wait_for_reduce(self) -> None:
        if self._reduced is None:
            return
        self._finish()
        adds = self._zero >= 2 and not self._is_of_copies
        if self._zero < 2 and self._size > 1 and self._copies is not None:
            self._sent.all_reduce(self._reduced.nbytes, self._copies.size())
            dist.all_reduce(self._reduced, group=self._copies)
        for piece, part in zip(self.pieces, self._reduced.split(self._lengths), strict=True):
            own = _local(piece.stored_gradient)
            part = part[: own.numel()].view(own.shape)
            own.add_(part) if adds else own.copy_(part)
        self._reduced, self._is_of_copies = None, False

    def _start(self, work: dist.Work | None) -> None:
        assert work is not None
        self._work.append(work)

    def _finish(self) -> None:
        """A bucket has one collective at a time."""
        for work in self._work:
            work.wait()
        self._work.clear()


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a trainable parameter has a gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _parts(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Parameters in order, in parts that are alike and have at most BUCKET_BYTES, or of one parameter."""
    part: list[_Piece] = []
    size_bytes = 0
    for piece in sorted(pieces, key=lambda piece: (piece.is_trainable, str(piece.rows.dtype), piece.is_same)):
        alike = part and (piece.is_trainable, piece.rows.dtype, piece.is_same) == (
            part[0].is_trainable,
            part[0].rows.dtype,
            part[0].is_same,
        )
        if part and (not alike or size_bytes + piece.whole.nbytes > BUCKET_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(piece)
        size_bytes += piece.whole.nbytes
    if part:
        yield part
