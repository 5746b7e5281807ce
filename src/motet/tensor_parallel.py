"""Products that tensor-parallel ranks share (Shoeybi et al. 2019, section 3).

In a branch of a layer, each rank has some of the heads, or some of the MLP's inner columns:

    hidden ─ norm ─ `copied` ─ columns of the first products ─ ... ─ rows of the last product ─ `summed` ─ + hidden

Hidden states between branches, norms and biases behind a sum are the same on all ranks, and so are their gradients: the
gradient of what is copied is summed in backward. All ranks of a group call everything here alike, on the same rows.

Between the branches of backbones and encoders each rank has a part of the rows (`RowParts`; Korthikanti et al. 2022,
section 4.2.2): it gathers all of them where it would copy, and sums those of each rank where it would sum. Then ranks
keep, and normalise, their rows alone, and gradients of norms and biases there are sums over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from motet.ahead import found
from motet.chunked import LaterWeight, summed_product
from motet.core.arrays import Int64Array
from motet.dropout import set_divided, some_more_rows
from motet.peer_copies import PeerCopies
from motet.transposed import is_transposed, out_first

_Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share products. index: of this rank among the `size` ranks of the group.

    sent:   gets the bytes that this rank sends in each collective of the group, as rings send them.
    chunks: in so many, products of branches and their collectives are beside each other (`chunked.py`); 1: one after
            the other.
    copies: by which chunks travel; None: by collectives of torch.

    Example:
        >>> [TensorRanks(None, index, size=2).part(5) for index in range(2)]
        [(0, 3), (3, 5)]
    """

    group: dist.ProcessGroup | None
    index: int
    size: int
    sent: list[float] = field(default_factory=list, compare=False)
    chunks: int = 1
    copies: PeerCopies | None = None

    def part(self, num: int) -> tuple[int, int]:
        """(first, stop) of this rank's share of `num` rows or columns, cut as torch.chunk cuts."""
        return part_of(num, self.index, self.size)

    def count(self, whole_bytes: int, times: int = 1) -> None:
        """Count an all-gather to whole_bytes, or a reduce-scatter of them; an all-reduce is two of these."""
        self.sent.append(times * whole_bytes * (self.size - 1) / self.size)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce x over the ranks, in place."""
        self.count(x.nbytes, times=2)
        dist.all_reduce(x, op=op, group=self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        """Itself: a copy of a model, as averages of weights are kept in, has the same ranks."""
        return self


def part_of(num: int, index: int, size: int) -> tuple[int, int]:
    """(first, stop) of part `index` of `num` rows or columns in `size` parts, cut as torch.chunk cuts."""
    most = -(-num // size)
    first = min(index * most, num)
    return first, min(first + most, num)


def copied(x: Tensor, ranks: TensorRanks) -> Tensor:
    """x, which is the same on all ranks; its gradient is summed over them."""
    return _Transposed.apply(x, _as_it_is, partial(_all_reduced, ranks=ranks))


def summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of x over ranks; its gradient, which is the same on all ranks, goes to each of them."""
    return _Transposed.apply(x, partial(_all_reduced, ranks=ranks), _as_it_is)


def counted_once(x: Tensor, ranks: TensorRanks) -> Tensor:
    """x, which is the same on all ranks, as is its gradient here: each rank's is its even share of that."""
    return _Transposed.apply(x, _as_it_is, partial(_share_of, ranks=ranks))


class _Transposed(torch.autograd.Function):
    """there(x); the gradient goes back by `back`, which is the transpose of `there`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Move, back: _Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)


def _share_of(x: Tensor, ranks: TensorRanks) -> Tensor:
    return x / ranks.size


def _all_reduced(x: Tensor, ranks: TensorRanks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # What is given may be read by others.
    ranks.all_reduce(total)
    return total


_NUM_ROWS = "rows between branches"
"""By which the number of rows is found of which ranks have parts."""


def _unknown() -> int:
    raise ValueError("parts of rows have come, and nobody has said how many rows there are")


class _Rows(local):
    """Of a thread, as passes that pause have one each. num: as of `RowParts.of`. come, stay: as of `handed`."""

    num = 0
    come = stay = False


class RowParts:
    """How hidden states between the branches of a module are: whole on all ranks or, in the block of `of`, in parts.

    Parts are of rows alone: dimensions before these are 1 there.

    meanwhile: called while rows between branches are on their way: with True while they are summed, False while they
               are gathered. It may run other work. None: nothing runs beside them.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks, self._rows = ranks, _Rows()
        self.meanwhile: Callable[[bool], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowParts:
        """Itself, as of `TensorRanks`: hooks of a copied model still call this one."""
        return self

    @property
    def num_rows(self) -> int:
        """All rows, in the block of `of`; else 0."""
        return self._rows.num

    @contextmanager
    def of(self, num_rows: int) -> Iterator[None]:
        """In the block, each rank has a part of so many rows, equally many each; the last ones may be padding. 0: each
        has all rows.
        """
        before, self._rows.num = self._rows.num, num_rows
        try:
            yield
        finally:
            self._rows.num = before

    @contextmanager
    def handed(self, *, come: bool, stay: bool) -> Iterator[None]:
        """In the block, `in_parts` is given this rank's part of the rows (come), or returns it (stay).

        So a pass in several calls has rows together at its ends alone. How many there are is found with the microbatch
        (`ahead.finding`), as parts do not say it.
        """
        before, (self._rows.come, self._rows.stay) = (self._rows.come, self._rows.stay), (come, stay)
        try:
            yield
        finally:
            self._rows.come, self._rows.stay = before

    @property
    def come_in_parts(self) -> bool:
        """Whether rows come as this rank's part of them, in the block of `handed`."""
        return self._rows.come

    @property
    def stay_in_parts(self) -> bool:
        """Whether rows are left as this rank's part of them, in the block of `handed`."""
        return self._rows.stay

    def held(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs with rows as they are now, whenever it is called, and by whichever thread."""
        num_rows = self.num_rows

        def running(*args: Any, **kwargs: Any) -> Any:
            with self.of(num_rows):
                return run(*args, **kwargs)

        return running

    def in_parts(self, layers: Callable[..., Tensor], rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What layers make of rows [num_rows, width], which all ranks have, as they have what comes back, but for what
        `handed` says.

        layers: are called with this rank's part of the rows, and return as many. Raises ValueError for parts of which
        nobody has said how many rows there are.
        """
        come, stay = self._rows.come, self._rows.stay
        num_rows = found(_NUM_ROWS, _unknown) if come else len(rows)
        if not num_rows:
            return layers(rows, *args, **kwargs)
        if stay:
            found(_NUM_ROWS, lambda: num_rows)
        with self.of(num_rows), some_more_rows(num_rows, lambda: self._numbers_of(num_rows)):
            passed = layers(rows if come else self.own(rows), *args, **kwargs)
            return passed if stay else self.whole(passed)

    def _numbers_of(self, num_rows: int) -> Int64Array:
        """The numbers of this rank's rows of so many, int64 [rows of a part]; padding has that of the last."""
        size = -(-num_rows // self.ranks.size)
        return np.arange(size * self.ranks.index, size * (self.ranks.index + 1)).clip(max=num_rows - 1)

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of rows [num_rows, width] that all ranks have, as they have their gradient."""
        return _Transposed.apply(rows, self._part, self._gathering())

    def whole(self, part: Tensor) -> Tensor:
        """All rows [num_rows, width] of the parts, on all ranks, whose gradients are the same."""
        return _Transposed.apply(part, self._gathering(), self._part)

    def on_all_rows(self, forward: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What a function of all rows makes of hidden states [..., rows, width], as they are between branches.

        Parts are gathered for it, and taken of what it returns. Inside, all ranks have all rows.
        """
        if not self.num_rows:
            return forward(hidden, *args, **kwargs)
        ahead, rows = hidden.shape[:-2], self.whole(hidden.flatten(0, -2))
        with self.of(0):
            passed = forward(rows.view(*ahead, *rows.shape), *args, **kwargs)
        own = self.own(passed.flatten(0, -2))
        return own.view(*ahead, *own.shape)

    def into_products(self, hidden: Tensor) -> Tensor:
        """What the first products of a branch multiply, [..., all rows, width], from what its norm has made."""
        if not self.num_rows:
            return _Transposed.apply(hidden, _as_it_is, self._summed)
        rows = _Transposed.apply(hidden.flatten(0, -2), self._gathering(), self._scattered)
        return rows.view(*hidden.shape[:-2], -1, hidden.shape[-1])

    def from_products(self, products: Tensor) -> Tensor:
        """The sum over ranks of what the last products of a branch have made, [..., rows, width]."""
        if not self.num_rows:
            return _Transposed.apply(products, self._summed, _as_it_is)
        rows = _Transposed.apply(products.flatten(0, -2), self._scattered, self._gathering())
        return rows.view(*products.shape[:-2], -1, products.shape[-1])

    def shared(self, parameter: Tensor) -> Tensor:
        """A parameter that each rank uses on its own rows; where all use it on all rows, their gradients are alike."""
        return copied(parameter, self.ranks) if self.num_rows else parameter

    def _padded(self, rows: Tensor) -> Tensor:
        """rows [n, width] with rows of zeros behind them, so that all ranks have as many."""
        lacking = -len(rows) % self.ranks.size
        return torch.cat([rows, rows.new_zeros(lacking, rows.shape[1])]) if lacking else rows.contiguous()

    def _part(self, rows: Tensor) -> Tensor:
        return self._padded(rows).chunk(self.ranks.size)[self.ranks.index].clone()

    def _scattered(self, rows: Tensor) -> Tensor:
        padded = self._padded(rows)
        part = padded.new_empty(len(padded) // self.ranks.size, padded.shape[1])
        self.ranks.count(padded.nbytes)
        self._move(dist.reduce_scatter_single, part, padded, is_sum=True)
        return part

    def _summed(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.ranks.count(total.nbytes, times=2)
        self._move(dist.all_reduce, total, is_sum=True)
        return total

    def _gathering(self) -> _Move:
        """What gathers the rows that there are now: backward comes when `num_rows` may be another number."""
        return partial(self._gathered, num_rows=self.num_rows)

    def _gathered(self, part: Tensor, num_rows: int) -> Tensor:
        every = part.new_empty(self.ranks.size * len(part), part.shape[1])
        self.ranks.count(every.nbytes)
        self._move(dist.all_gather_single, every, part.contiguous(), is_sum=False)
        return every[:num_rows]

    def _move(self, collective: Callable[..., dist.Work | None], *tensors: Tensor, is_sum: bool) -> None:
        """Run a collective over the ranks, and what runs beside it."""
        work = collective(*tensors, group=self.ranks.group, async_op=self.meanwhile is not None)
        if work is not None and self.meanwhile is not None:
            self.meanwhile(is_sum)
            work.wait()


class RowLinear(nn.Linear):
    """The last product of a branch, of which each rank has some columns of the weight: it sums over ranks, then adds
    the bias. It has the parameters of `layer`.

    product: multiplies without the bias; `runtime/deferred.py` puts another one in its place, and is asked by `waits`
             where products are in chunks.
    """

    def __init__(self, layer: nn.Linear, parts: RowParts) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.is_transposed = layer.weight, layer.bias, is_transposed(layer)
        self.parts = parts
        self.product: Callable[[Tensor], Tensor] = self._product
        self.waits: LaterWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        beside = self.beside(x)
        set_divided()  # Behind the sum, all ranks have all columns.
        if self.parts.ranks.chunks > 1:
            rows = summed_product(x, self, beside, self.parts)
        else:
            product = self.product(x)
            rows = self.parts.from_products(product if beside is None else product + beside)
        return rows if self.bias is None else rows + self.parts.shared(self.bias)

    def beside(self, x: Tensor) -> Tensor | None:
        """What this rank adds to the sum beside its product; None: nothing."""
        return None

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, out_first(self))


class SharedLinear(nn.Linear):
    """A linear layer without a bias that each rank has whole, between what all ranks have and a part of its own: the
    gradient of its weight is summed over ranks. It has the parameters of `layer`.
    """

    def __init__(self, layer: nn.Linear, ranks: TensorRanks) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, None
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, copied(self.weight, self.ranks))


def sum_gradients(module: nn.Module, shared: Callable[[Tensor], Tensor]) -> None:
    """Let the gradients of a module's own parameters be summed over ranks. It gets another `forward`, with the same
    result, in place.

    shared: `copied` for norms of queries and keys, which each rank calls with heads of its own, and `RowParts.shared`
            for those that it calls with rows of its own.
    """
    module.forward = with_copies(module, module.forward, shared)  # type: ignore[method-assign]


def with_copies(
    module: nn.Module, run: Callable[..., Tensor], shared: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """A function like `run` in which a module's own parameters are what `shared` makes of them."""
    return partial(_with_copies, module, run, shared)


def _with_copies(
    module: nn.Module, run: Callable[..., Tensor], shared: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    own = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = shared(parameter)  # type: ignore[assignment]
        return run(*args, **kwargs)
    finally:
        module._parameters.update(own)


def divide_norm(norm: nn.Module, num_columns: int, ranks: TensorRanks) -> None:
    """Let a root mean square norm of rows take the mean over all `num_columns`, of which each rank has some.

    It gets another `forward`, in place. norm: has `weight`, and `eps` or `variance_epsilon`; it multiplies by the
    weight in at least float32, unless its `wide_weight` is False.
    """
    norm.forward = partial(_normalised, norm, num_columns, ranks)  # type: ignore[method-assign]


def _normalised(norm: Any, num_columns: int, ranks: TensorRanks, columns: Tensor) -> Tensor:
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    add = partial(_all_reduced, ranks=ranks)
    # Every rank reads the sum for columns of its own, so that its gradient is a sum over ranks too.
    squares = _Transposed.apply(wide.square().sum(-1, keepdim=True), add, add)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    wide = wide * torch.rsqrt(squares / num_columns + eps)
    if getattr(norm, "wide_weight", True):
        return (norm.weight * wide).to(columns.dtype)
    return norm.weight * wide.to(columns.dtype)


def divide_vocabulary(embedding: nn.Embedding, ranks: TensorRanks) -> None:
    """Let an embedding, of which this rank has some rows, sum what ranks look up. It changes in place."""
    first, stop = ranks.part(embedding.num_embeddings)
    if embedding.padding_idx is not None:
        # Its row gets no gradient, on the rank that has it.
        is_here = first <= embedding.padding_idx < stop
        embedding.padding_idx = embedding.padding_idx - first if is_here else None
    embedding.forward = partial(_looked_up, embedding.forward, ranks, first, stop)  # type: ignore[method-assign]


def _looked_up(
    forward: Callable[[Tensor], Tensor], ranks: TensorRanks, first: int, stop: int, tokens: Tensor
) -> Tensor:
    is_here = (tokens >= first) & (tokens < stop)
    rows = forward(torch.where(is_here, tokens - first, 0))
    return summed(rows.masked_fill(~is_here[..., None], 0), ranks)


def vocabulary_cross_entropy(logits: Tensor, tokens: Tensor, ranks: TensorRanks, vocabulary_size: int) -> Tensor:
    """Cross entropy, summed over tokens, of logits of which each rank has those of some entries of the vocabulary.

    logits: [n, entries of this rank], float32 or float64. tokens: int64 [n]. No rank has more than three numbers of
    another one's logits.
    """
    return _VocabularyCrossEntropy.apply(logits, tokens, ranks, ranks.part(vocabulary_size)[0])


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, ranks: TensorRanks, first: int) -> Tensor:
        largest = logits.amax(-1)
        ranks.all_reduce(largest, dist.ReduceOp.MAX)
        is_here = (tokens >= first) & (tokens < first + logits.shape[1])
        column = torch.where(is_here, tokens - first, 0)[:, None]
        shifted = logits - largest[:, None]
        of_token = shifted.gather(1, column)[:, 0].masked_fill(~is_here, 0)
        shares = shifted.exp_()
        totals = torch.stack([shares.sum(-1), of_token])
        ranks.all_reduce(totals)
        ctx.save_for_backward(shares.div_(totals[0][:, None]), column, is_here)
        return (totals[0].log() - totals[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, column, is_here = ctx.saved_tensors
        of_logits = shares.scatter_add(1, column, -is_here.to(shares.dtype)[:, None])
        return of_logits.mul_(gradient), None, None, None


def likeliest_entry(logits: Tensor, ranks: TensorRanks, vocabulary_size: int) -> Tensor:
    """The entry of the vocabulary with the largest logit, int64 [n], the first of equal ones. logits: as above."""
    largest, entry = logits.max(-1)
    own = torch.stack([largest.double(), (entry + ranks.part(vocabulary_size)[0]).double()])
    every = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(every, own, group=ranks.group)
    values, entries = torch.stack(every).unbind(1)  # [size, n] each
    best = (values == values.amax(0)).to(torch.int64).argmax(0, keepdim=True)
    return entries.gather(0, best)[0].to(torch.int64)
