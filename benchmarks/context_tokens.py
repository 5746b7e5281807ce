"""Who has which tokens of sequences that ranks share: balance beside others, and rows that move. Used by context.py."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from papers_masks import documents
from rows import Row

from motet.analyze.lengths import read_lengths
from motet.assign.context_rows import context_rows
from motet.balance import Segments, distribute_tokens
from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows, moved_heads
from motet.core.cuts import ItemCuts
from motet.core.sight import Sight

NUM_RANKS, NUM_MASKS, BLOCK = 8, 10, 128
NUM_PACKS, PACK = 10, 2**15
HEADS, KV_HEADS = 32, 8
UNITS_A_RANK = 64
"""Units of a fragment of a cut sequence, all of which are alike."""
IMAGES, WINDOWS = ("image",), ((0, 1), (1024, 5))
SIGHTS = {
    "causal": Sight(),
    "images both ways": Sight(IMAGES),
    "windows": Sight(windows=WINDOWS),
    "images both ways, windows": Sight(IMAGES, windows=WINDOWS),
}
"""What rows see: windows of 1,024 in five of six layers, as in Gemma 3."""


def balance_rows(seed: int) -> Iterator[Row]:
    """Pairs of (query, key) of the busiest rank over the mean, as a mean of masks; the goal is the best of others."""
    for mask in ("EP", "EE", "MP"):
        for num_tokens in (2**14, 2**15, 2**16):
            rng = np.random.default_rng(seed)
            drawn = [Segments.of_documents(documents(mask, num_tokens, rng)) for _ in range(NUM_MASKS)]
            pairs = [segments.table().pairs for segments in drawn]
            found = {
                name: float(np.mean([imbalance(of_row, layout(segments, number)) for number, of_row, segments in each]))
                for name, layout in layouts(num_tokens).items()
                for each in [list(zip(range(NUM_MASKS), pairs, drawn))]
            }
            what = f"balance, {mask}, {num_tokens // 1024} k:"
            own = found.pop("motet")
            yield Row(f"{what} motet", own, min(found.values()))
            for name, value in found.items():
                yield Row(f"{what} {name}", value)


def layouts(num_tokens: int) -> dict[str, Callable[[Segments, int], Int64Array]]:
    """The rank of each token, int64 [num_tokens], by who deals them out; of a mask and its number.

    motet:         blocks of 128, equally many a rank, by `distribute_tokens` of the mask, as training deals them out.
    Cornstarch:    its LPT on the same blocks (section 4.3.2), and its random distribution of single tokens (5.3).
    MagiAttention: its default, a heap over ranks of which none gets more than its share of the chunks, largest first;
                   with chunks of its default size, an eighth of a rank's tokens, and of 128.
    ring, zigzag:  as Cornstarch compares itself with them.
    """

    def chunked(block: int, deal: Callable[[Int64Array, int], Int64Array]) -> Callable[[Segments, int], Int64Array]:
        def layout(segments: Segments, _: int) -> Int64Array:
            pairs = segments.table().pairs
            chunks = np.add.reduceat(pairs, np.arange(0, num_tokens, block))
            return np.repeat(deal(chunks, NUM_RANKS), block)[:num_tokens]

        return layout

    def ours(segments: Segments, _: int) -> Int64Array:
        owner = distribute_tokens(segments, NUM_RANKS, BLOCK, equal_counts=True).ranks
        return np.repeat(owner, BLOCK)[:num_tokens].astype(np.int64)

    def by(method: str, block: int) -> Callable[[Segments, int], Int64Array]:
        return lambda segments, number: np.repeat(
            distribute_tokens(segments, NUM_RANKS, block, method, seed=number).ranks, block
        )[:num_tokens].astype(np.int64)

    return {
        "motet": ours,
        "Cornstarch's LPT": chunked(BLOCK, longest_first),
        "Cornstarch's random": by("random", 1),
        "MagiAttention, its chunks": chunked(-(-num_tokens // (8 * NUM_RANKS)), equally_many),
        "MagiAttention, chunks of 128": chunked(BLOCK, equally_many),
        "zigzag": by("zigzag", BLOCK),
        "ring": by("ring", BLOCK),
    }


def longest_first(work: Int64Array, num_ranks: int) -> Int64Array:
    """The rank of each chunk, int64 [num_chunks]: the largest first, each to the rank with the least work."""
    return _heaped(work, num_ranks, len(work))


def equally_many(work: Int64Array, num_ranks: int) -> Int64Array:
    """As `longest_first`, and no rank gets more than its share of the chunks, rounded up."""
    return _heaped(work, num_ranks, -(-len(work) // num_ranks))


def _heaped(work: Int64Array, num_ranks: int, most: int) -> Int64Array:
    ranks, counts = np.zeros(len(work), dtype=np.int64), [0] * num_ranks
    heap = [(0, rank) for rank in range(num_ranks)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        ranks[chunk], counts[rank] = rank, counts[rank] + 1
        if counts[rank] < most:  # A full rank gets no more.
            heapq.heappush(heap, (load + int(work[chunk]), rank))
    return ranks


def imbalance(pairs: Int64Array, owner: Int64Array, num_ranks: int = NUM_RANKS) -> float:
    """Pairs of the busiest rank over the mean. pairs, owner: int64 [num_tokens]."""
    loads = np.bincount(owner, pairs, num_ranks)
    return float(loads.max() / loads.mean())


def moved_rows_of(lengths: Path, seed: int) -> Iterator[Row]:
    """Rows whose keys and values leave their rank in a layer, on packs of real examples without caps."""
    if not lengths.exists():
        print(f"moved: {lengths} is absent, so nothing is drawn")
        return
    workload, rng = read_lengths(lengths).workload(even=True), np.random.default_rng(seed)
    packs = [pack_of(workload.draw(256, rng)) for _ in range(NUM_PACKS)]
    for num_ranks in (2, 4, 8):
        for way, sight in SIGHTS.items():
            if sight.windows != WINDOWS:
                yield from moved_by_each(packs, num_ranks, way)
            yield from dealt_by_each(packs, num_ranks, way)


def pack_of(drawn) -> tuple[Int64Array, list[list[int]]]:
    """Lengths of some of the drawn examples, and where their images stand: before their text."""
    images = drawn.items["image"]
    rows = np.bincount(images.example, images.num_tokens, len(drawn.sequence)).astype(np.int64)
    count = max(1, int(np.searchsorted(np.cumsum(drawn.sequence), PACK)))
    lengths = drawn.sequence[:count]
    starts = np.cumsum(lengths) - lengths
    runs = [[start, start + taken] for start, taken in zip(starts.tolist(), rows[:count].tolist()) if taken]
    return lengths, runs


def moved_by_each(packs: list[tuple[Int64Array, list[list[int]]]], num_ranks: int, way: str) -> Iterator[Row]:
    of_keys = of_all = least = 0
    busiest, sight = np.zeros(3), SIGHTS[way]
    for lengths, images in packs:
        runs = images if sight.bidirectional else []
        rows = context_rows(lengths, num_ranks, sight.pairs(lengths, np.array(runs)))
        table = AttentionTable.packed(lengths, together=runs)
        seen, everything = rows.wanted(table), [table.keys] * num_ranks
        of_keys, of_all = of_keys + sent(rows, seen), of_all + sent(rows, everything)
        least += least_rows(rows, runs)
        by_cast, by_heads = moved_heads(rows.most_moved(seen), rows.most_moved(everything), num_ranks, HEADS, KV_HEADS)
        by_gather = rows.most_moved(everything) * 2.0 * KV_HEADS
        busiest += np.array([by_cast, by_heads, by_gather])
    what = f"moved, {num_ranks} ranks, {way}:"
    yield Row(f"{what} rows by all-gather, a pack", of_all / len(packs))
    yield Row(f"{what} rows by group-cast, a pack", of_keys / len(packs))
    yield Row(f"{what} rows by group-cast over the fewest that there can be", of_keys / least, 1.0, of_keys == least)
    for name, value in zip(("group-cast", "Ulysses"), busiest[:2]):
        yield Row(f"{what} elements of the busiest rank by {name} over all-gather", value / busiest[2])


def dealt_by_each(packs: list[tuple[Int64Array, list[list[int]]]], num_ranks: int, way: str) -> Iterator[Row]:
    """Pairs of the busiest rank over the mean: of packs, and of the longest sequence of each cut into equal fragments.

    By what rows see, as training deals them out, and as if all were causal.
    """
    sight, found = SIGHTS[way], np.zeros((2, 2))
    units = np.arange(num_ranks + 1) * UNITS_A_RANK
    fragments = np.zeros(num_ranks, np.int64), np.arange(num_ranks, dtype=np.int32), units[:-1], units[1:]
    cuts = ItemCuts(*fragments, np.full(num_ranks, units[-1]))
    for lengths, images in packs:
        longest, starts = int(np.argmax(lengths)), np.cumsum(lengths) - lengths
        runs = np.array(images if sight.bidirectional else [], dtype=np.int64).reshape(-1, 2)
        of_longest = runs[runs[:, 0] == starts[longest]] - starts[longest]
        for number, (each, together) in enumerate(((lengths, runs), (lengths[longest, None], of_longest))):
            pairs = sight.pairs(each, together)
            seen = AttentionTable.packed(each).pairs if pairs is None else pairs
            for by, given in enumerate((pairs, None)):
                rows = cuts.owner(0, int(each[0]), given) if number else context_rows(each, num_ranks, given).owner
                found[number, by] += imbalance(seen, rows, num_ranks) / len(packs)
    for what, (seen, causal) in zip(("packs", "the longest sequence cut"), found, strict=True):
        name = f"dealt, {num_ranks} ranks, {way}, {what}: pairs of the busiest rank over the mean"
        yield Row(f"{name}, as training deals rows out", float(seen), 1.01)
        yield Row(f"{name}, as if all were causal", float(causal))


def sent(rows: ContextRows, wanted: list[Int64Array]) -> int:
    """Rows that leave their rank, as ranks exchange them."""
    moves = [rows.moves(rank, wanted) for rank in range(rows.num_ranks)]
    return sum(sum(each.num_sent) - each.num_sent[rank] for rank, each in enumerate(moves))


def least_rows(rows: ContextRows, runs: list[list[int]]) -> int:
    """Rows that ranks lack and some row of theirs sees, document by document, without a table.

    In a document a rank needs all rows from its begin to the last one that it sees.
    """
    last_seen = np.arange(rows.num_rows)
    for first, stop in runs:
        last_seen[first:stop] = stop - 1
    lacking = 0
    for start, length in zip((np.cumsum(rows.lengths) - rows.lengths).tolist(), rows.lengths.tolist()):
        owner = rows.owner[start : start + length]
        for rank in range(rows.num_ranks):
            own = np.flatnonzero(owner == rank)
            if len(own):
                stop = int(last_seen[start + own].max()) + 1 - start
                lacking += stop - int((own < stop).sum())
    return lacking
