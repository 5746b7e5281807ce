"""Gradients of a module that every rank holds whole: summed over ranks in flat buckets, while backward still runs.

FSDP is for what is shared out. Around a module that is not, its hooks cost a blocking reduction a block (docs/log.md).
Here gradients are views of flat buffers, as in torch's DistributedDataParallel (Li et al. 2020, section 3.2). That is
for one forward and one backward pass of a whole model, on ranks that all have input.

All ranks start the same reductions in the same order. A bucket is started once it and all buckets before it are
complete; those that are left are started when the backward pass ends, with zeros for parameters that were not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.runtime.clip import square_sum_of_share
from motet.runtime.sent_bytes import SentBytes

BUCKET_BYTES = 25 * 2**20
"""Small enough that the first reduction starts early, large enough that its latency is hidden."""


class ReplicatedGradients:
    """The gradients of one module. group: the ranks that hold a copy of it; each calls every method alike. None: this
    rank alone holds it. reduce_dtype: in which gradients are summed over ranks; None: their own. sent: counts bytes.
    num_tensor_copies: tensor-parallel ranks that have the same parameters; each of them is in a group of its own.

    Example, on one rank of a group:

        gradients = ReplicatedGradients(module.parameters(), group)
        gradients.zero()                # p.grad of each trainable parameter is a view of a bucket
        with gradients.summed():        # the last backward pass of the step
            loss.backward()
        gradients.wait()                # p.grad is the sum over ranks
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype | None = None,
        sent: SentBytes | None = None,
        num_tensor_copies: int = 1,
    ) -> None:
        # Backward reaches the last parameters first.
        self._buckets = [_Bucket(part) for part in _parts(reversed([*parameters]))]
        self._group, self._sent, self._num_tensor_copies = group, sent or SentBytes(), num_tensor_copies
        self._num_started = 0
        self._reduce_dtype = reduce_dtype
        self._under_way: list[tuple[dist.Work, Tensor, Tensor]] = []
        self._sums = False
        for bucket in self._buckets if self._is_shared else ():
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._accumulated(bucket))

    @property
    def flat(self) -> list[Tensor]:
        """The buckets, each one dimension: the gradients themselves. Empty where the step has none of this module."""
        return [bucket.flat for bucket in self._buckets if bucket.parameters[0].grad is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether the step has gradients of this module."""
        return bool(self.flat)

    @property
    def _is_shared(self) -> bool:
        return self._group is not None and self._group.size() > 1

    def square_sum(self, device: torch.device) -> Tensor:
        """This rank's share of the squared norm of the gradients, a float64 scalar; shares add up over all ranks."""
        rank, num_ranks = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        return square_sum_of_share(self.flat, rank, num_ranks, device) / self._num_tensor_copies

    def zero(self) -> None:
        """Begin a step: gradients are zero, and no longer None."""
        self._num_started = 0
        for bucket in self._buckets:
            bucket.zero()

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Around the last backward pass of a step: what has been accumulated until its end is summed over ranks.

        Raises UserError where a parameter gets its gradient in several parts: a sum may have started after the first.
        """
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
        self._sums = True
        try:
            yield
        finally:
            self._sums = False
        self.start()

    def start(self) -> None:
        """Start the sums that are left, of what has been accumulated until now."""
        self._start(len(self._buckets))

    def wait(self) -> None:
        """Until every sum that was started is there; on CUDA the current stream waits, and not the host."""
        for work, flat, message in self._under_way:
            work.wait()
            if message is not flat:
                flat.copy_(message)
        self._under_way.clear()

    def _accumulated(self, bucket: _Bucket) -> None:
        if not self._sums:
            return
        bucket.num_missing -= 1
        if bucket.num_missing < 0:
            raise UserError(
                "A parameter got more than one gradient in one backward pass, as torch.utils.checkpoint gives it with "
                "use_reentrant=True: set that to False, or fsdp.shard_size to more than 1."
            )
        complete = self._num_started
        while complete < len(self._buckets) and self._buckets[complete].num_missing == 0:
            complete += 1
        self._start(complete)

    def _start(self, until: int) -> None:
        for bucket in self._buckets[self._num_started : until] if self._is_shared else ():
            message = bucket.flat.to(self._reduce_dtype or bucket.flat.dtype)
            assert self._group is not None, "one rank alone has nothing to sum"
            self._sent.all_reduce(message.nbytes, self._group.size())
            work = dist.all_reduce(message, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((work, bucket.flat, message))
        self._num_started = max(self._num_started, until)


class _Bucket:
    """Parameters whose gradients lie one after the other in one tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.num_missing = parameters, 0
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in parameters])
        self._views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]

    def zero(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


def _parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Trainable parameters, in order, in parts of one type and of at most BUCKET_BYTES, or of one parameter."""
    part: list[nn.Parameter] = []
    size_bytes = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if part and (parameter.dtype != part[0].dtype or size_bytes + parameter.nbytes > BUCKET_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(parameter)
        size_bytes += parameter.nbytes
    if part:
        yield part
