"""Attention by tiles on a CPU, all tiles of a table in one node of the autograd graph.

Rows of a run (`models/row_runs.py`) see some keys whole, and as many as they are in a triangle; a kernel takes either
without a mask. Each gives the logarithm of its sum of exponents, by which both parts are joined, as ring attention
joins blocks (Liu et al. 2023, arXiv:2310.01889). Gradients of keys are added up in place: a node for each tile would
fill and add a gradient of all keys each time, which took as long as half of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.models.tiles import Tile, tile_mask


def attend_tiles(
    query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tile], bounds: Sequence[Tensor], scale: float | None
) -> Tensor:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, keys, head_dim] -> the shape of the query.

    tiles: of a table, which together have each row once. bounds: its starts and ends, as of `tile_mask`.
    scale: of scores; None: 1 / sqrt(head_dim). A row that sees no key gets 0.
    """
    attended: Tensor = _Tiles.apply(query, key, value, tiles, bounds, scale)
    return attended


class _Part(NamedTuple):
    """Rows first to last (exclusive) against keys low to high, which one call of the kernel takes.

    is_causal: in a triangle. is_masked: with the mask of the tile.
    """

    low: int
    high: int
    is_causal: bool = False
    is_masked: bool = False


def _parts(tile: Tile) -> list[_Part]:
    if tile.high == tile.low:
        return []
    if not tile.is_run:
        return [_Part(tile.low, tile.high, is_masked=not tile.full)]
    diagonal = tile.high - (tile.last - tile.first)
    before = [_Part(tile.low, diagonal)] if diagonal > tile.low else []
    return [*before, _Part(diagonal, tile.high, is_causal=True)]


class _Tiles(torch.autograd.Function):
    """Masks are made again in backward: those of all tiles would fill the memory."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Sequence[Tile],
        bounds: Sequence[Tensor],
        scale: float | None,
    ) -> Tensor:
        out, logs = _by_row(query), None
        for tile in tiles:
            made = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    _rows(query, tile), *keys, 0.0, part.is_causal, attn_mask=mask, scale=scale
                )
                for part, keys, mask in _pieces(tile, bounds, key, value)
            ]
            if not made:
                _rows(out, tile).zero_()
                continue
            attended, log = made[0] if len(made) == 1 else _joined(*made)
            if logs is None:
                logs = log.new_zeros(1, query.shape[2], query.shape[1]).transpose(1, 2)
            _rows(out, tile).copy_(attended)
            _rows(logs, tile).copy_(log)
        ctx.save_for_backward(query, key, value, out, logs, *bounds)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs, *bounds = ctx.saved_tensors
        of_query, of_keys = _by_row(query), [_by_row(x).zero_() for x in (key, value)]
        for tile in ctx.tiles:
            of_rows, is_first = _rows(of_query, tile), True
            for part, keys, mask in _pieces(tile, bounds, key, value):
                # With the output and the sum over all keys, the kernel gives the gradients of each part.
                own, *parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    _rows(gradient, tile),
                    _rows(query, tile),
                    *keys,
                    _rows(out, tile),
                    _rows(logs, tile),
                    0.0,
                    part.is_causal,
                    attn_mask=mask,
                    scale=ctx.scale,
                )
                of_rows.copy_(own) if is_first else of_rows.add_(own)
                is_first = False
                for total, of_part in zip(of_keys, parts, strict=True):
                    total.narrow(2, part.low, part.high - part.low).add_(of_part)
            if is_first:
                of_rows.zero_()
        return (of_query, *of_keys, None, None, None)


def _by_row(like: Tensor) -> Tensor:
    """An empty tensor of a shape [1, heads, rows, head_dim], of which each row lies together, as layers want it."""
    return like.new_empty(1, like.shape[2], like.shape[1], like.shape[3]).transpose(1, 2)


def _rows(x: Tensor, tile: Tile) -> Tensor:
    return x.narrow(2, tile.first, tile.last - tile.first)


def _pieces(
    tile: Tile, bounds: Sequence[Tensor], key: Tensor, value: Tensor
) -> Iterator[tuple[_Part, list[Tensor], Tensor | None]]:
    """Each part of a tile, with its keys and values, and what is added to its scores."""
    for part in _parts(tile):
        keys = [x.narrow(2, part.low, part.high - part.low) for x in (key, value)]
        yield part, keys, _added_mask(tile, bounds, key.dtype) if part.is_masked else None


def _added_mask(tile: Tile, bounds: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a tile that is not full, [rows, keys]: 0, or minus infinity."""
    mask = tile_mask(tile, *bounds)
    assert mask is not None, "a tile that is not full"
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The output [1, heads, rows, head_dim] and the logarithms [1, heads, rows] of two parts of the keys together."""
    (out, log), (other_out, other_log) = one, other
    weight = torch.sigmoid(other_log - log)[..., None]
    joined = torch.lerp(out.to(weight.dtype), other_out.to(weight.dtype), weight)
    return joined, torch.logaddexp(log, other_log)
