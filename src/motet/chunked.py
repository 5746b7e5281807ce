"""Products and collectives of tensor-parallel ranks in chunks, one sent while another is computed (chunked overlap).

    gathered rows:    gather 0 | gather 1     | gather 2     |             the last chunk's product is all that waits
                               | products 0   | products 1   | products 2
    summed products:  product 0 | product 1   | product 2    |             remap: rows of chunks back into their order
                                | sum 0       | sum 1        | sum 2

This is StepCCL (MMScale, section 6), by collectives of torch or, on GPUs of a node, copy engines (`peer_copies.py`). It
is off (`TensorRanks.chunks` is 1) unless a Plan's cluster has `tensor_pieces`: no GPU has shown yet that it gains.

A chunk has a run of rows of each rank's part, so that a sum goes to the rank, and is added up in the order, that the
undivided sum has: results are the same bit by bit where the library computes a row alike among many rows and few (MKL
does in float64, from four rows on, on some processors and not on others). The gradient of a weight is one product of
all rows for the same reason; it is computed while the last sums are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from motet.transposed import is_transposed, out_first

if TYPE_CHECKING:
    from motet.peer_copies import PeerCopies
    from motet.tensor_parallel import RowLinear, RowParts, TensorRanks

LaterWeight = Callable[..., bool]
"""(weight, rows, gradient of the products) -> whether the gradient of the weight is computed later."""
_Span = tuple[int, int]


class _Collectives:
    """Collectives of torch on a group, called as `PeerCopies` are."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all_gather(self, every: Tensor, part: Tensor) -> Any:
        return dist.all_gather_single(every, part, group=self._group, async_op=True)

    def reduce_scatter(self, part: Tensor, every: Tensor) -> Any:
        return dist.reduce_scatter_single(part, every, group=self._group, async_op=True)

    def all_reduce(self, every: Tensor) -> Any:
        return dist.all_reduce(every, group=self._group, async_op=True)


def _carrier(ranks: TensorRanks) -> PeerCopies | _Collectives:
    """What chunks travel by."""
    return _Collectives(ranks.group) if ranks.copies is None else ranks.copies


class RowChunks:
    """How rows of all ranks are cut into chunks.

    in_parts: whether each rank has a part of the rows between branches, which are gathered and scattered; else all
              ranks have all of them.

    Example:
        >>> from types import SimpleNamespace
        >>> chunks = RowChunks(SimpleNamespace(size=2, chunks=2), num_rows=6, in_parts=True)
        >>> chunks.spans, chunks.of(torch.arange(6)[:, None], chunks.spans[0])[:, 0].tolist()
        ([(0, 2), (2, 3)], [0, 1, 3, 4])
    """

    def __init__(self, ranks: TensorRanks, num_rows: int, in_parts: bool) -> None:
        self.ranks, self.num_rows, self.in_parts = ranks, num_rows, in_parts
        self.in_part = -(-num_rows // ranks.size)
        most = -(-self.in_part // ranks.chunks)
        self.spans = [(first, min(first + most, self.in_part)) for first in range(0, self.in_part, max(most, 1))]

    def padded(self, rows: Tensor) -> Tensor:
        """rows [num_rows, width] with rows of zeros behind them, so that all parts have as many."""
        return pad(rows, (0, 0, 0, self.ranks.size * self.in_part - len(rows)))

    def empty(self, like: Tensor, width: int) -> Tensor:
        """Room for all rows of this width, padded."""
        return like.new_empty(self.ranks.size * self.in_part, width)

    def of(self, padded: Tensor, span: _Span) -> Tensor:
        """One chunk of padded rows: those of a span of each part."""
        return self._parts(padded)[:, slice(*span)].flatten(0, 1)

    def put(self, padded: Tensor, span: _Span, chunk: Tensor) -> None:
        """Put a chunk to its rows, in place."""
        self._parts(padded)[:, slice(*span)] = chunk.unflatten(0, (self.ranks.size, -1))

    def unpadded(self, padded: Tensor) -> Tensor:
        """The rows that there are."""
        return padded[: self.num_rows] if len(padded) > self.num_rows else padded

    def gathered(self, part: Tensor) -> Iterator[tuple[_Span, Tensor]]:
        """Chunks of the rows of all ranks, one by one as they arrive. part: this rank's rows [in_part, width]."""
        part, carrier = part.contiguous(), _carrier(self.ranks)
        started: deque[tuple[_Span, Tensor, Any]] = deque()
        for first, stop in self.spans:
            every = part.new_empty(self.ranks.size * (stop - first), part.shape[1])
            self.ranks.count(every.nbytes)
            started.append(((first, stop), every, carrier.all_gather(every, part[first:stop])))
        while started:
            span, every, work = started.popleft()
            work.wait()
            yield span, every

    def _parts(self, padded: Tensor) -> Tensor:
        return padded.unflatten(0, (self.ranks.size, self.in_part))


class _Sums:
    """Sums over ranks of chunks of rows, each of which starts as soon as it is added."""

    def __init__(self, chunks: RowChunks, like: Tensor, width: int) -> None:
        self._chunks, self._started = chunks, list[tuple[_Span, Tensor, Any]]()
        self._sum = like.new_empty(chunks.in_part, width) if chunks.in_parts else chunks.empty(like, width)

    def add(self, span: _Span, chunk: Tensor) -> None:
        """Start the sum of a chunk, which is not used behind this."""
        ranks, in_parts = self._chunks.ranks, self._chunks.in_parts
        ranks.count(chunk.nbytes, times=1 if in_parts else 2)
        carrier = _carrier(ranks)
        work = carrier.reduce_scatter(self._sum[slice(*span)], chunk) if in_parts else carrier.all_reduce(chunk)
        self._started.append((span, chunk, work))

    def wait(self) -> Tensor:
        """The rows of this rank's part, or all rows."""
        for span, chunk, work in self._started:
            work.wait()
            if not self._chunks.in_parts:
                self._chunks.put(self._sum, span, chunk)
        return self._sum if self._chunks.in_parts else self._chunks.unpadded(self._sum)


class ColumnLinear(nn.Linear):
    """One of the first products of a branch, of which each rank has some rows of the weight. It has the parameters of
    `layer`, and what else is in it.

    product: multiplies; `runtime/deferred.py` puts another one in its place, and asks with `waits`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.is_transposed = layer.weight, layer.bias, is_transposed(layer)
        self._modules.update(layer._modules)
        self.product: Callable[[Tensor], Tensor] = self._product
        self.waits: LaterWeight | None = None
        self.made: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        made, self.made = self.made, None
        return made[1] if made is not None and made[0] is x else self.product(x)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, out_first(self), self.bias)


class ColumnProducts:
    """The first products of a branch, all made from each chunk of rows as it arrives."""

    def __init__(self, parts: RowParts, layers: Sequence[ColumnLinear]) -> None:
        self._parts, self._layers = parts, layers

    def of(self, hidden: Tensor) -> Tensor:
        """The rows that the layers multiply, as of `RowParts.into_products`. They have multiplied these already."""
        num_rows, layers = self._parts.num_rows, self._layers
        rows = hidden.flatten(0, -2)
        chunks = RowChunks(self._parts.ranks, num_rows or len(rows), in_parts=num_rows > 0)
        parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
        whole, *made = (
            x.view(*hidden.shape[:-2], -1, x.shape[-1]) for x in _Columns.apply(rows, chunks, layers, *parameters)
        )
        for layer, product in zip(layers, made):
            layer.made = whole, product
        return whole


def summed_product(x: Tensor, layer: RowLinear, beside: Tensor | None, parts: RowParts) -> Tensor:
    """The sum over ranks of the product of a layer, without its bias, and of what is beside it, as of
    `RowParts.from_products`. x: [..., rows, in].
    """
    num_rows, rows = parts.num_rows, x.flatten(0, -2)
    chunks = RowChunks(parts.ranks, len(rows), in_parts=num_rows > 0)
    beside = None if beside is None else beside.flatten(0, -2)
    sums = _Summed.apply(rows, layer.weight, beside, chunks, layer)
    return sums.view(*x.shape[:-2], -1, sums.shape[-1])


class _Columns(torch.autograd.Function):
    """(rows of this rank, weights, biases) -> (all rows, their products with each weight)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, chunks: RowChunks, layers: Sequence[ColumnLinear], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        num = len(layers)
        matrices, biases = list(map(out_first, layers, parameters)), parameters[num:]
        if chunks.in_parts:
            rows, *made = (chunks.empty(hidden, width) for width in (hidden.shape[1], *map(len, matrices)))
            for span, chunk in chunks.gathered(hidden):
                chunks.put(rows, span, chunk)
                for product, matrix, bias in zip(made, matrices, biases):
                    chunks.put(product, span, linear(chunk, matrix, bias))
            rows, *made = map(chunks.unpadded, (rows, *made))
        else:
            rows, made = hidden.view_as(hidden), [linear(hidden, *own) for own in zip(matrices, biases)]
        is_kept = any(ctx.needs_input_grad[3 : 3 + num])
        ctx.save_for_backward(*([rows] if is_kept else []))
        # By reference: torch.utils.checkpoint would give back copies, whose gradients are nobody's.
        ctx.weights, ctx.chunks, ctx.layers = parameters[:num], chunks, layers
        ctx.set_materialize_grads(False)
        return (rows, *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None, *of_made: Tensor | None) -> tuple[Any, ...]:
        chunks, num, sums = ctx.chunks, len(of_made), None
        (rows,) = ctx.saved_tensors or (None,)
        if ctx.needs_input_grad[0]:
            matrices = map(out_first, ctx.layers, ctx.weights)
            sums = _backward_sums(chunks, of_rows, [own for own in zip(of_made, matrices) if own[0] is not None])
        of_weights, of_biases = [None] * num, [None] * num
        for number, gradient in enumerate(of_made):
            if gradient is None:
                continue
            if ctx.needs_input_grad[3 + number]:
                of_weights[number] = _of_weight(ctx.layers[number], ctx.weights[number], rows, gradient)
            if ctx.needs_input_grad[3 + num + number]:
                of_biases[number] = gradient.sum(0)
        return None if sums is None else sums.wait(), None, None, *of_weights, *of_biases


def _backward_sums(chunks: RowChunks, of_rows: Tensor | None, products: Sequence[tuple[Tensor, Tensor]]) -> _Sums:
    """Start the sums of the gradient of all rows. products: (gradient, matrix) of each, added up from the last one on,
    as autograd does.
    """
    like, width = (of_rows, of_rows.shape[1]) if of_rows is not None else (products[0][0], products[0][1].shape[1])
    sums = _Sums(chunks, like, width)
    padded = [(chunks.padded(gradient), matrix) for gradient, matrix in reversed(products)]
    beside = None if of_rows is None else chunks.padded(of_rows)
    for span in chunks.spans:
        total = None if beside is None else chunks.of(beside, span).clone()
        for gradient, matrix in padded:
            part = chunks.of(gradient, span) @ matrix
            total = part if total is None else total.add_(part)
        sums.add(span, total)
    return sums


class _Summed(torch.autograd.Function):
    """(x of all rows, weight, beside) -> the sum over ranks of products and beside, of this rank's rows or of all."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, beside: Tensor | None, chunks: RowChunks, layer: RowLinear
    ) -> Tensor:
        ctx.save_for_backward(*([x] if ctx.needs_input_grad[1] else []))
        ctx.weight, ctx.chunks, ctx.layer, matrix = weight, chunks, layer, out_first(layer, weight)
        sums, padded = _Sums(chunks, x, len(matrix)), chunks.padded(x)
        beside = None if beside is None else chunks.padded(beside)
        for span in chunks.spans:
            product = linear(chunks.of(padded, span), matrix)
            sums.add(span, product if beside is None else product.add_(chunks.of(beside, span)))
        return sums.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        chunks, matrix, of_x = ctx.chunks, out_first(ctx.layer, ctx.weight), None
        (x,) = ctx.saved_tensors or (None,)
        if chunks.in_parts:
            whole, of_x = (chunks.empty(gradient, width) for width in matrix.shape)
            for span, chunk in chunks.gathered(gradient):
                chunks.put(whole, span, chunk)
                if ctx.needs_input_grad[0]:
                    chunks.put(of_x, span, chunk @ matrix)
            gradient, of_x = chunks.unpadded(whole), chunks.unpadded(of_x)
        elif ctx.needs_input_grad[0]:
            of_x = gradient @ matrix
        of_weight = _of_weight(ctx.layer, ctx.weight, x, gradient) if ctx.needs_input_grad[1] else None
        of_beside = gradient if ctx.needs_input_grad[2] else None
        return of_x if ctx.needs_input_grad[0] else None, of_weight, of_beside, None, None


def _of_weight(layer: ColumnLinear | RowLinear, weight: Tensor, rows: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of a layer's weight; None if it waits."""
    read, made = (gradient, rows) if layer.is_transposed else (rows, gradient)
    # The gradient of a weight that is computed from others goes on into their graph.
    if weight.is_leaf and layer.waits is not None and layer.waits(weight, read, made):
        return None
    return made.t() @ read
