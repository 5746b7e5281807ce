"""Context parallelism: which rank computes which block of a sequence's tokens.

Cornstarch (section 4.3.2) places blocks of tokens by their attention work, not by their number: in a multimodal
sequence the work does not follow from the number. Its Algorithm 2 is LPT (corrected: it walks the sorted list, and
pushes the new load back for the same rank). Swaps follow, as for whole items. The layouts that the paper compares with
are here, too. The work of a block is that of its queries, wherever the keys are: this fits all-gather context
parallelism.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers, checked_num_ranks
from motet.balance.placement import assign, score
from motet.balance.segments import MAX_TOKENS, Segments
from motet.core.arrays import Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError

TokenMethod = Literal["lpt", "zigzag", "ring", "random"]

TIME_BUDGET_S = 0.0005
"""Time of the swaps: a million tokens then take about 1 ms in all. More time gains less than 0.1 %."""


def distribute_tokens(
    segments: Segments | ArrayLike,
    num_ranks: int,
    block: int = 128,
    method: TokenMethod = "lpt",
    *,
    equal_counts: bool = False,
    seed: int = 0,
    backend: Backend = "native",
) -> Assignment:
    """Place the blocks of a sequence on ranks. A block is `block` consecutive tokens; the last may be shorter.

    segments: who attends to whom; or how many tokens each token attends to, int64 [num_tokens], such as
        `AttentionTable.pairs`, or their sum over layers with windows of their own.
    block: number of tokens that the attention kernel works on at once. If a single block has more work than the mean
        rank (then its load is the bound, and imbalance[0] is 1), a smaller block balances better.
    method: "lpt":    balance the attended (query, key) pairs, nearly always to 0.1 %;
            "zigzag": rank r gets chunks r and 2 num_ranks - 1 - r of 2 num_ranks: balanced for one causal document;
            "ring":   rank r gets the r-th of num_ranks chunks;
            "random": equally many blocks for each rank, drawn by `seed`.
    equal_counts: with "lpt", the block counts of two ranks differ by at most one, which balances memory and the work
        outside attention.

    The items of the Assignment are blocks. Its loads, int64 [num_ranks, 2], are exact numbers of attended pairs and of
    tokens; bound [2] and imbalance [2] likewise. O(num_segments + num_blocks log num_blocks); no mask is built.
    Raises ArgumentError for numbers of tokens that are no whole ones of 0 or more, num_ranks < 1, block outside
    1 .. 2^31 - 1, seed outside 0 .. 2^64 - 1, an unknown method, and equal_counts with another method than "lpt".
    """
    num_ranks = checked_num_ranks(num_ranks)
    if equal_counts and method != "lpt":
        raise ArgumentError(f"equal_counts is given with method {method!r}; it is for 'lpt' alone.")
    for name, value, least, most in (("block", block, 1, MAX_TOKENS), ("seed", seed, 0, 2**64 - 1)):
        if not least <= value <= most:
            raise ArgumentError(f"{name} is {value}; it must be from {least} to {most}.")
    if isinstance(segments, Segments):
        columns = (segments.length, segments.document, segments.modality, segments.instance, segments.attends_to)
        pairs, num_tokens = algorithms(backend).block_pairs(*columns, block), segments.num_tokens
    else:
        of_tokens = checked_integers(segments, "segments")
        num_tokens = len(of_tokens)
        pairs = np.add.reduceat(of_tokens, np.arange(0, num_tokens, block)) if num_tokens else of_tokens
    if method == "lpt":
        placed = assign(pairs, num_ranks, equal_counts=equal_counts, time_budget_s=TIME_BUDGET_S, backend=backend)
    else:
        placed = score(_layout(len(pairs), num_ranks, method, seed), pairs, num_ranks)
    return _with_tokens(placed, num_tokens, block)


def _layout(num_blocks: int, num_ranks: int, method: TokenMethod, seed: int) -> Int64Array:
    """The rank of each block by its index alone, int64 [num_blocks]."""
    index = np.arange(num_blocks)
    match method:
        case "ring":
            return index * num_ranks // num_blocks
        case "zigzag":
            chunk = index * 2 * num_ranks // max(num_blocks, 2 * num_ranks)
            return np.minimum(chunk, 2 * num_ranks - 1 - chunk)
        case "random":
            ranks = np.empty(num_blocks, dtype=np.int64)
            ranks[np.argsort(_random_keys(num_blocks, seed), kind="stable")] = index % num_ranks
            return ranks
    raise ArgumentError(f"method is {method!r}; it must be 'lpt', 'zigzag', 'ring' or 'random'.")


def _random_keys(count: int, seed: int) -> NDArray[np.uint16]:
    """Random uint16 [count] from SplitMix64 (Steele et al. 2014): the same with every numpy, and sorted by radix."""
    key = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    key *= np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((key ^ (key >> np.uint64(31))) >> np.uint64(48)).astype(np.uint16)


def _with_tokens(placed: Assignment, num_tokens: int, block: int) -> Assignment:
    """The Assignment with the number of tokens as a second column of loads and bound."""
    tokens = placed.counts * block
    missing = placed.num_items * block - num_tokens  # the last block is shorter by it
    if missing:
        tokens[placed.ranks[-1]] -= missing
    # Some rank has the mean number of full blocks or more; some rank that of all blocks, one of which may be short.
    bound_of_full_blocks = -(-(num_tokens // block) // placed.num_ranks) * block
    bound_of_blocks = -(-placed.num_items // placed.num_ranks) * block - missing
    return Assignment(
        placed.ranks,
        placed.items,
        placed.offsets,
        np.stack([placed.loads, tokens], axis=1),
        np.array([placed.bound, max(bound_of_full_blocks, bound_of_blocks, 0)], dtype=np.int64),
    )
