"""Attention by a table on one GPU: flex attention with our BlockMask, beside what PyTorch has for the same mask.

    python benchmarks/attention_gpu.py [--seed 0] [--json FILE]

Packs of 4, 16 and 64 k tokens (`context.pack_of`): documents, causal, whose images see themselves in both directions;
16 heads of queries and 4 of keys, 128 wide, in bfloat16. Milliseconds are of forward and backward by CUDA events, the
median of several after a warm-up, in one process. Data are random.

flex:    `motet.models.table_items`, compiled once, at the first pack; that no later length compiles is a row.
dense:   scaled_dot_product_attention with the same mask, which has rows x keys entries. Goal: flex takes no longer.
blocks:  the BlockMask on its way to the device, by the clock, beside torch's `create_block_mask` there.
packed:  the documents without images: the varlen kernel, which Motet takes then, beside flex attention.
error:   of the result and of gradients, against the dense mask in float32; bfloat16 rounds to 4e-3.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from context import pack_of
from rows import Row, finish, options, show
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from motet.core.attention_table import AttentionTable
from motet.models.flex import FlexTable
from motet.models.table_items import TableItems

SIZES = {"4 k": 2**12, "16 k": 2**14, "64 k": 2**16}
MOST_DENSE = 2**14
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 4, 128
REPEATS, WARM = 9, 3
MOST_ERROR = 1e-2
DEVICE = torch.device("cuda")


def median_ms(run: Callable[[], object]) -> float:
    """Of `run` on the device, by events."""
    for _ in range(WARM):
        run()
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def median_clock_ms(run: Callable[[], object]) -> float:
    """Of `run` from its call until the device has what it made."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(taken)


def drawn(num_rows: int, seed: int) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    made = [torch.randn(1, n, num_rows, HEAD_DIM, generator=generator, device=DEVICE).bfloat16() for n in heads]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def by_items(items: TableItems, tensors: list[Tensor]) -> list[Tensor]:
    """The result, [1, rows, heads, width], and the gradients of query, key and value."""
    query, key, value, grad = tensors
    out = items.attend(query, key, value, None, 0.0, None)
    return [out, *torch.autograd.grad(out, tensors[:3], grad.transpose(1, 2))]


def by_flex(flex: FlexTable, tensors: list[Tensor]) -> list[Tensor]:
    query, key, value, grad = tensors
    out = flex.attend(query, key, value, None, None, None)
    return [out, *torch.autograd.grad(out, tensors[:3], grad)]


def by_mask(mask: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    out = scaled_dot_product_attention(*tensors[:3], attn_mask=mask, enable_gqa=True)
    return [out.transpose(1, 2), *torch.autograd.grad(out, tensors[:3], tensors[3])]


def dense_mask(table: AttentionTable) -> Tensor:
    """bool [1, 1, rows, keys]."""
    key = torch.arange(table.num_keys, device=DEVICE)
    bounds = zip(table.start, table.end, strict=True)
    seen = [
        (torch.from_numpy(start).to(DEVICE)[:, None] <= key) & (key < torch.from_numpy(end).to(DEVICE)[:, None])
        for start, end in bounds
    ]
    return torch.stack(seen).any(0)[None, None]


def largest_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative, in the norm of each tensor."""
    pairs = zip(found, exact, strict=True)
    return max(float((mine.float() - theirs.float()).norm() / theirs.float().norm()) for mine, theirs in pairs)


def rows_of(name: str, num_rows: int, seed: int) -> Iterator[Row]:
    lengths, images = pack_of(num_rows, np.random.default_rng(seed))
    table, packed = AttentionTable.packed(lengths, together=images), AttentionTable.packed(lengths)
    tensors = drawn(num_rows, seed)
    pairs = int((table.end - table.start).sum())
    items = TableItems(table)
    flex_ms = median_ms(lambda: by_items(items, tensors))
    yield Row(f"{name}: flex, ms", flex_ms)
    # Forward has two products of a pair, backward five.
    yield Row(f"{name}: flex, TFLOP/s", 7 * 2 * pairs * NUM_HEADS * HEAD_DIM / flex_ms / 1e9)
    if num_rows <= MOST_DENSE:
        mask = dense_mask(table)
        dense_ms = median_ms(lambda: by_mask(mask, tensors))
        yield Row(f"{name}: dense mask, ms", dense_ms)
        yield Row(f"{name}: flex over dense", flex_ms / dense_ms, 1.0)
        exact = by_mask(mask, [each.detach().float().requires_grad_() for each in tensors])
        yield Row(f"{name}: error", largest_error(by_items(items, tensors), exact), MOST_ERROR)
    ours_ms = median_clock_ms(lambda: FlexTable(table, DEVICE).blocks)
    yield Row(f"{name}: blocks from the table, ms", ours_ms)
    if num_rows <= MOST_DENSE:
        start, end = (torch.from_numpy(column[0]).to(DEVICE) for column in (table.start, table.end))
        theirs_ms = median_clock_ms(
            lambda: create_block_mask(
                lambda batch, head, row, key: (start[row] <= key) & (key < end[row]),
                None, None, num_rows, num_rows, device="cuda",
            )
        )  # fmt: skip
        yield Row(f"{name}: create_block_mask on the device, ms", theirs_ms)
        yield Row(f"{name}: blocks, ours over theirs", ours_ms / theirs_ms, 1.0)
    documents = TableItems(packed)
    varlen_ms = median_ms(lambda: by_items(documents, tensors))
    yield Row(f"{name}: packed documents, the varlen kernel, ms", varlen_ms)
    flex = FlexTable(packed, DEVICE)
    flex_of_pack_ms = median_ms(lambda: by_flex(flex, tensors))
    yield Row(f"{name}: packed documents, varlen over flex", varlen_ms / flex_of_pack_ms, 1.0)


def main() -> None:
    asked = options(__doc__, reads_lengths=False).parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_gpu.py needs a CUDA device.")
    rows = []
    compiled = 0
    for name, num_rows in SIZES.items():
        for row in rows_of(name, num_rows, asked.seed):
            rows.append(row)
            show(row)
        compiled = compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    later = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled
    rows.append(Row("graphs that later lengths compiled", later, 0))
    show(rows[-1])
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": asked.seed}
    finish(rows, asked.json, **about)


if __name__ == "__main__":
    main()
