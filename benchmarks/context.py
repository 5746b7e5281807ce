"""Sequences that ranks share, and attention over a multimodal mask.

    python benchmarks/context.py [--seed 0] [--json FILE] [--only NAME] [--lengths FILE]

blockmask: the BlockMask from the table of who sees whom, against torch's `create_block_mask` (below).
balance:   tokens dealt out over 8 ranks: (query, key) pairs of the busiest rank over the mean on masks drawn as of
           Cornstarch's Table 4, beside its LPT and random distribution, ring, zigzag, and MagiAttention's dispatch. The
           goal is the best of all. The published table has milliseconds (`papers_masks.py`); nothing is timed here.
ahead:     what a step's thread makes of a microbatch's tables where the thread that loads has not, and what it does
           where that has (below).
moved:     rows that move in a layer's attention on packs of 32 k tokens of real examples without caps
           (../shared/data/lengths.csv.gz, or --lengths FILE; without it nothing is drawn), of 32 heads of queries and 8
           of keys. The goal is that group-cast moves no row more than the mask asks for, which is counted without the
           table. Beside them stands how evenly training deals out the pairs of these packs, and of their longest
           sequences where these are cut; the goal is within 1 %.

Documents of log-normal length are packed, with images among their text that see themselves in both directions. All is
processor time of this process on one thread, in one run:

BlockMask: torch's, once, and from the table, the median of several, with the table itself and a BlockMask that has the
           index of both directions. Goals: 100 times faster at 16 k tokens, below 20 ms at 64 k, and no block differs.
window:    the same of a layer with a sliding window.
rank:      the same of one of 8 ranks, whose rows are every eighth block of 128, against the keys that they see.
ahead:     a backbone with images in both directions and layers with a window and without, as Gemma 3 has them, on 64 k
           tokens, and on the rows of one of 8 ranks that share them by group-cast: from places of rows to blocks for
           flex attention, as on CUDA, without copies to a device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from context_tokens import balance_rows, moved_rows_of
from rows import Row, finish, options, show
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from motet.ahead import MadeAhead, finding
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.dispatch import PackedSequences
from motet.dispatch.context import share_sequences
from motet.models import table_items
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.flex import FlexTable, block_mask

GAIN, MOST_MS, FOUND_MS = 100.0, 20.0, 1.0
COMPARED, LARGE = 2**14, 2**16
WINDOW, NUM_RANKS, BLOCK = 1024, 8, 128
CPU = torch.device("cpu")


def pack_of(num_tokens: int, rng: np.random.Generator) -> tuple[list[int], list[list[int]]]:
    """Lengths of documents, and from where to where their images stand."""
    lengths: list[int] = []
    images: list[list[int]] = []
    while (start := sum(lengths)) < num_tokens:
        lengths.append(min(num_tokens - start, int(np.clip(rng.lognormal(7, 1), 64, 16384))))
        at, end = start, start + lengths[-1]
        while (at := at + int(rng.integers(20, 400))) + 256 <= end:
            images.append([at, at := min(end, at + 256 * int(rng.integers(1, 13)))])
    return lengths, images


def made_of(table: AttentionTable) -> BlockMask:
    made = FlexTable(table, CPU)
    return block_mask(made.start, made.end, made.blocks, (table.num_rows, table.num_keys), made.block)


def median_s(work: Callable[[], object], count: int = 15) -> float:
    taken = []
    for _ in range(count):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return statistics.median(taken)


def of_torch(table: AttentionTable) -> tuple[BlockMask, float]:
    """torch's BlockMask of the same table, and its seconds."""
    start, end = (torch.from_numpy(column[0]) for column in (table.start, table.end))
    began_s = time.process_time()
    made = create_block_mask(
        lambda batch, head, row, key: (start[row] <= key) & (key < end[row]),
        None,
        None,
        table.num_rows,
        table.num_keys,
        device="cpu",
    )
    return made, time.process_time() - began_s


def num_different(one: BlockMask, other: BlockMask) -> int:
    """Entries of their columns that are not equal."""
    columns = zip(one.as_tuple(flatten=False)[1:9], other.as_tuple(flatten=False)[1:9], strict=True)
    return sum(int((mine != theirs).sum()) for mine, theirs in columns)


def block_mask_rows(seed: int) -> Iterator[Row]:
    packs = {size: pack_of(size, np.random.default_rng(seed)) for size in (COMPARED, LARGE)}

    def table(size: int) -> AttentionTable:
        lengths, images = packs[size]
        return AttentionTable.packed(lengths, together=images)

    taken_s = median_s(lambda: made_of(table(COMPARED)))
    theirs, theirs_s = of_torch(table(COMPARED))
    yield Row("BlockMask, 16 k: create_block_mask, ms", 1e3 * theirs_s)
    yield Row("BlockMask, 16 k: from the table, ms", 1e3 * taken_s)
    yield Row("BlockMask, 16 k: times faster", theirs_s / taken_s, GAIN, theirs_s / taken_s >= GAIN)
    yield Row("BlockMask, 16 k: entries that differ", num_different(made_of(table(COMPARED)), theirs), 0)
    yield Row("BlockMask, 64 k: from the table, ms", 1e3 * median_s(lambda: made_of(table(LARGE))), MOST_MS)
    whole = table(LARGE)
    windowed_s = median_s(lambda: made_of(whole.windowed(WINDOW)))
    yield Row("BlockMask, 64 k, window: from the table, ms", 1e3 * windowed_s, MOST_MS)
    rows = np.flatnonzero(np.arange(LARGE) // BLOCK % NUM_RANKS == 3)

    def of_rank() -> BlockMask:
        return made_of(whole.of(rows, whole.of(rows, whole.keys).seen))

    yield Row("BlockMask, 64 k, rank: from the table, ms", 1e3 * median_s(of_rank), MOST_MS)


def gemma() -> Backbone:
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        return Backbone(
            AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION), bidirectional=["image"]
        )


def packed(seed: int) -> PackedSequences:
    lengths, images = pack_of(LARGE, np.random.default_rng(seed))
    tokens, offsets = torch.zeros(LARGE, dtype=torch.int64), torch.tensor([0, *lengths]).cumsum(0).int()
    places = torch.cat([torch.arange(*image) for image in images])
    return PackedSequences(tokens, tokens > 0, offsets, {"image": places})


def ahead_rows(seed: int) -> Iterator[Row]:
    backbone, whole = gemma(), packed(seed)
    owner = np.arange(LARGE) // BLOCK % NUM_RANKS
    context = share_sequences(ContextRows(np.diff(whole.offsets.numpy()).astype(np.int64), owner, NUM_RANKS), 3, whole)
    shared = replace(whole, context=replace(context, method="group_cast"))

    def take(made: MadeAhead, sequences: PackedSequences) -> None:
        with finding("backbone", made):
            backbone.make_ahead(sequences, range(2), CPU, torch.bfloat16)

    with mock.patch.object(table_items, "has_flex", return_value=True):
        for name, sequences in (("ahead, 64 k", whole), ("ahead, 64 k, rank", shared)):
            yield Row(f"{name}: made by the step, ms", 1e3 * median_s(lambda each=sequences: take(MadeAhead(), each)))
            take(made := MadeAhead(), sequences)
            found_ms = 1e3 * median_s(lambda each=sequences, made=made: take(made, each))
            yield Row(f"{name}: found by the step, ms", found_ms, FOUND_MS)


PARTS = {
    "ahead": lambda asked: ahead_rows(asked.seed),
    "blockmask": lambda asked: block_mask_rows(asked.seed),
    "balance": lambda asked: balance_rows(asked.seed),
    "moved": lambda asked: moved_rows_of(asked.lengths, asked.seed),
}


def main() -> None:
    asked = options(__doc__, f"one of {', '.join(PARTS)}").parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, part in PARTS.items():
        for row in part(asked) if asked.only in ("", name) else ():
            show(row)
            rows.append(row)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
