"""Attention by a table on CUDA: torch's flex attention with a BlockMask made from the table.

The function is compiled once, for all lengths. The BlockMask is put together inside it from tensors, since its lengths
would otherwise be constants of the compiled code. Tables with several intervals a row have 2, 4, 8, ... of them; each
number compiles once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from motet.core.attention_table import AttentionTable
from motet.core.block_table import BlockTable
from motet.models.asked import Asked
from motet.on_device import Staged

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_HEAD_DIM = 16
"""Triton multiplies no narrower matrices."""
_MIN_ROWS = 128
"""torch compiles anew for fewer rows, whatever kernel is asked for. Rows that see nothing make up for them."""


class FlexTable:
    """A table and its blocks on a device, as flex attention reads them. They go there when they are first read."""

    def __init__(self, table: AttentionTable, device: torch.device) -> None:
        self.num_rows, self.missing_rows = table.num_rows, max(0, _MIN_ROWS - table.num_rows)
        table = _with_blind_rows(table, self.missing_rows)
        made = BlockTable.of(table, least=2)  # torch compiles anew for a dimension of 1
        lists = (made.partial, made.full, made.partial_of_keys, made.full_of_keys)
        missing = (1 << (len(table.start) - 1).bit_length()) - len(table.start)
        start, end = (np.pad(column, [(0, missing), (0, 0)]) for column in (table.start, table.end))
        columns = [start, end, *(column for each in lists for column in (each.counts, each.indices))]
        self.block, self._shapes = made.block, [column.shape for column in columns]
        # Whole numbers as int32, in one copy.
        flat = np.concatenate([column.ravel() for column in columns], dtype=np.int32, casting="unsafe")
        self._flat = Staged([flat], device)

    @cached_property
    def _columns(self) -> list[Tensor]:
        parts = self._flat.there[0].split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def start(self) -> Tensor:
        """Where intervals begin, int32 [num_intervals, num_rows]; some may be empty in all rows."""
        return self._columns[0]

    @property
    def end(self) -> Tensor:
        """Where they end, as `start`."""
        return self._columns[1]

    @cached_property
    def blocks(self) -> tuple[Tensor, ...]:
        """Counts and indices of `BlockTable`, in the order of BlockMask's arguments, [1, 1, n] and [1, 1, n, m]."""
        return tuple(block[None, None] for block in self._columns[2:])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [1, heads, num_rows, head_dim], key and value [1, kv_heads, num_keys, head_dim] -> as the query."""
        return self.attend_by(_of_constants(scale, softcap, self.block), query, key, value, sinks)

    def attend_by(
        self, run: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """As `attend`. run: `attend_by` of the module, compiled or not."""
        rows = pad(query, (0, 0, 0, self.missing_rows)) if self.missing_rows else query
        return run(rows, key, value, self.start, self.end, self.blocks, sinks)[:, :, : self.num_rows]


def _with_blind_rows(table: AttentionTable, count: int) -> AttentionTable:
    """The table with some rows more behind its own, which see no key."""
    if count == 0:
        return table
    bounds = (np.pad(column, [(0, 0), (0, count)]) for column in (table.start, table.end))
    rows = np.arange(count) + (table.rows[-1] + 1)
    return AttentionTable(*bounds, np.append(table.rows, rows), table.keys, np.append(table.document, rows))


def has_flex(asked: Asked) -> bool:
    """Whether flex attention computes this on the device. It has no dropout by item."""
    is_known = asked.dtype in _DTYPES and asked.head_dim >= _MIN_HEAD_DIM
    return asked.device.type == "cuda" and not asked.dropout and is_known


def block_mask(
    start: Tensor, end: Tensor, blocks: tuple[Tensor, ...], lengths: tuple[int, int], block: int
) -> BlockMask:
    """The BlockMask of a table: equal to that of `create_block_mask`. lengths: (num_rows, num_keys)."""

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (start[0, row] <= key) & (key < end[0, row])
        for interval in range(1, start.shape[0]):
            seen = seen | ((start[interval, row] <= key) & (key < end[interval, row]))
        return seen

    return BlockMask(lengths, *blocks, BLOCK_SIZE=(block, block), mask_mod=sees)


def attend_by(scale: float | None, softcap: float | None, block: int) -> Callable[..., Tensor]:
    """Flex attention over a table with these constants, not compiled."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        start: Tensor,
        end: Tensor,
        blocks: tuple[Tensor, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        mask = block_mask(start, end, blocks, (query.shape[2], key.shape[2]), block)
        out, aux = flex_attention(
            query,
            key,
            value,
            score_mod=None if softcap is None else cap,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options={"BACKEND": "TRITON"},  # else short sequences take, and compile, another kernel
            return_aux=AuxRequest(lse=sinks is not None),
        )
        if sinks is None:
            return out
        # A sink adds exp(sink) to the sum of each row's weights, and nothing to their sum of values.
        return (out * torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])[..., None]).to(out.dtype)

    return attend


def compiled(run: Callable[..., Tensor], backend: str | Callable[..., object] = "inductor") -> Callable[..., Tensor]:
    """`attend_by`, compiled at the first call for all later ones."""
    made = torch.compile(run, backend=backend, dynamic=True, fullgraph=True)

    def call(*tensors: object) -> Tensor:
        # Sizes that are equal by chance at the first call, such as rows and keys, are no more so later.
        # A number that a closure holds (a soft cap) is a constant.
        with _config.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):
            return made(*tensors)

    return call


@cache
def _of_constants(scale: float | None, softcap: float | None, block: int) -> Callable[..., Tensor]:
    return compiled(attend_by(scale, softcap, block))
